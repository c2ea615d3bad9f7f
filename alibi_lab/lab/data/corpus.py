"""Loads a corpus as tokens and draws training batches from it.

`load_corpus` returns the tokens, the tokenizer, the starts of documents, and the facts for records; with a store, a text is
tokenized once and mapped from disk (`token_store.py`). `batches` yields training batches; `packed_batches` yields the same
batches with the document of each token, for attention within documents. Next: `evaluate.py`.
"""

import collections
import contextlib
import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lab.lab.config import DataConfig, Task
from alibi_lab.lab.data import sources, tasks, token_store, tokens
from alibi_lab.lab.data.row_files import CorpusError as CorpusError
from alibi_lab.lab.data.tokenizing import ByteTokenizer, Tokenizer, token_dtype
from alibi_lab.lab.data.tokens import Corpus as Corpus
from alibi_lab.records import Json


def load_corpus(config: DataConfig, store: Path | None = None) -> Corpus:
    """The corpus that the config names.

    Args:
        store: a folder for tokenized texts. Each text is tokenized once, in constant memory, and mapped from disk; several
            processes may share the folder. None tokenizes in memory, every time.

    Raises:
        CorpusError: the text cannot be read or stored.
        TaskError: the documents of a task's corpus are too short for the task.
    """
    if task := tasks.parse_corpus(config.corpus):
        return _task_corpus(config.corpus, *task)
    if store is not None:
        return token_store.tokenized(config, store)
    text = sources.split_text(config, sources.text_files(config.corpus, config.text, config.text_field))
    files = collections.defaultdict[str, io.BytesIO](io.BytesIO)
    tokenizer, facts = tokens.tokenize_text(text, lambda name: contextlib.nullcontext(files[name]))
    return tokens.corpus_of(text.parts, facts, tokenizer, lambda name, dtype: _tensor(files[name], dtype))


def whole_text(paths: Sequence[Path], tokenizer: Tokenizer | None = None, text_field: str = "") -> Corpus:
    """The text of files and folders as a corpus to test on (`valid`), not split, with its facts; as bytes by default.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    documents = sources.documents_of(sources.local_files(paths, text_field))
    content, starts, digest = io.BytesIO(), io.BytesIO(), hashlib.sha256()
    counts = tokens.tokenize(documents, tokenizer, content, starts, digest)
    facts: dict[str, Json] = {"name": "text", "sha256": digest.hexdigest(), **tokens.text_facts(tokenizer, counts)}
    ids = _tensor(content, token_dtype(tokenizer.vocab_size))
    return Corpus(ids[:0], ids, facts, tokenizer=tokenizer, starts={"valid": _tensor(starts, torch.int64)})


def random_corpus(vocab_size: int, tokens: int) -> Corpus:
    """A text of random tokens, equal for equal arguments: to measure speed, which does not depend on the text."""
    drawn = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return Corpus(train=drawn, valid=drawn, facts={"name": "random"}, starts={"train": torch.tensor([0])})


def batches(tokens: Tensor, *, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches [batch_size, length + 1] of inputs and their next tokens, from step `start` on.

    The text is cut into nonoverlapping pieces of `length` tokens, and every epoch reads all of them in a new order. The order
    depends on the seed, the length and the batch size only: all methods of one seed see the same batches, and a resumed
    training sees those of an uninterrupted one.

    Raises:
        CorpusError: fewer tokens than one piece.
    """
    places = _places(num_pieces(tokens, length), length, batch_size, seed, start)
    return (torch.stack([tokens[begin : begin + length + 1] for begin in begins]).long() for begins in places)


def packed_batches(
    tokens: Tensor, starts: Tensor, *, length: int, batch_size: int, seed: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `batches`, each with the documents of its tokens; both [batch_size, length + 1].

    Documents follow one another and are cut at the end of a piece. For (x, d), the model reads x[:, :-1] with
    segment_ids=d[:, :-1]. The first token of a document has no context, so the loss counts only where d[:, 1:] == d[:, :-1].

    Args:
        starts: the starts of documents, `Corpus.starts["train"]`.

    Raises:
        CorpusError: fewer tokens than one piece.
    """
    places = _places(num_pieces(tokens, length), length, batch_size, seed, start)
    rows = batches(tokens, length=length, batch_size=batch_size, seed=seed, start=start)
    documents = (torch.stack([document_ids(starts, begin, length + 1) for begin in begins]) for begins in places)
    return zip(rows, documents, strict=True)


def document_ids(starts: Tensor, begin: int, count: int) -> Tensor:
    """The document index of each of `count` tokens from `begin` on, [count] int64.

    >>> document_ids(torch.tensor([0, 3, 5]), 1, 5)
    tensor([0, 0, 1, 1, 2])
    """
    return torch.searchsorted(starts, torch.arange(begin, begin + count), right=True) - 1


def num_pieces(tokens: Tensor, length: int) -> int:
    """The number of training examples of `length` tokens in the text.

    Raises:
        CorpusError: none.
    """
    pieces = (len(tokens) - 1) // length
    if pieces < 1:
        found = f"the training text has {len(tokens)} tokens but one training example has {length + 1}"
        raise CorpusError(f"{found}; pass more text or a smaller train.length")
    return pieces


def _places(pieces: int, length: int, batch_size: int, seed: int, start: int) -> Iterator[list[int]]:
    """The first tokens of the pieces of each batch; every epoch has another order."""
    first_epoch, read = divmod(start * batch_size, pieces)
    seeds = (seed * 1_000_003 + epoch for epoch in itertools.count(first_epoch))
    orders = (torch.randperm(pieces, generator=torch.Generator().manual_seed(one)).numpy() for one in seeds)
    places = itertools.islice(itertools.chain.from_iterable(orders), read, None)
    while True:
        yield [int(place) * length for place in itertools.islice(places, batch_size)]


def _tensor(file: io.BytesIO, dtype: torch.dtype) -> Tensor:
    content = file.getbuffer()
    return torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(0, dtype=dtype)


def _task_corpus(name: str, task: Task, document_tokens: int) -> Corpus:
    """Made from seeds within a second or two, so it is never stored; every byte is a token, text or not."""
    sizes = enumerate(tasks.CORPUS_TOKENS.items())
    parts = {part: tasks.task_tokens(task, n, seed, document_tokens=document_tokens) for seed, (part, n) in sizes}
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()
    facts: dict[str, Json] = {"name": name, "sha256": digest, "split": "made of different seeds"}
    facts |= {"tokenizer": "bytes", "vocab_size": 256, "bytes_per_token": 1}
    facts |= {f"{part}_tokens": len(ids) for part, ids in parts.items()}
    starts = {part: torch.arange(0, len(ids), document_tokens) for part, ids in parts.items()}
    return Corpus(parts["train"], parts["valid"], facts, parts["test"], starts=starts)
