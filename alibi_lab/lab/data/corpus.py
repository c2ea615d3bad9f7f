"""Loads a corpus as tokens and draws training batches from it.

`load_corpus` returns the tokens, the tokenizer, the starts of documents, and the facts for records; with a store, a text is
tokenized once and mapped from disk (`token_store.py`). `batches` yields training batches; `packed_batches` yields the same
batches with the document of each token, for attention within documents. Next: `evaluate.py`.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lab.lab.config import DataConfig, Task
from alibi_lab.lab.data import sources, tasks, token_store, tokens
from alibi_lab.lab.data.sources import CorpusError as CorpusError
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
    files = sources.text_files(config.corpus, config.text, config.text_field)
    return _in_memory(sources.split_text(config, files))


def whole_text(paths: Sequence[Path], tokenizer: Tokenizer | None = None, text_field: str = "") -> Corpus:
    """The text of files and folders as a corpus to test on (`valid`), not split, with its facts; as bytes by default.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    files = sources.local_files(paths, text_field)
    digest = hashlib.sha256()
    ids, starts, counts = _tokens(
        lambda: (document for file in files for document in file.documents()), tokenizer, digest
    )
    facts: dict[str, Json] = {"name": "text", "sha256": digest.hexdigest(), **tokens.text_facts(tokenizer, counts)}
    return Corpus(ids[:0], ids, facts, tokenizer=tokenizer, starts={"valid": starts})


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
    return (
        (batch, torch.stack([document_ids(starts, begin, length + 1) for begin in begins]))
        for batch, begins in zip(rows, places, strict=True)
    )


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
        raise CorpusError(
            f"the training text has {len(tokens)} tokens but one training example has {length + 1}; "
            "pass more text or a smaller train.length"
        )
    return pieces


def _places(pieces: int, length: int, batch_size: int, seed: int, start: int) -> Iterator[list[int]]:
    drawn = start * batch_size
    epoch, order = -1, torch.empty(0)
    while True:
        begins = []
        for n in range(drawn, drawn + batch_size):
            if n // pieces != epoch:
                epoch = n // pieces
                order = torch.randperm(pieces, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            begins.append(int(order[n % pieces]) * length)
        yield begins
        drawn += batch_size


def _in_memory(text: sources.Text) -> Corpus:
    tokenizer, digests = tokens.tokenizer_of(text), tokens.text_digests(text)
    parts = {part: _tokens(documents, tokenizer, digests[part]) for part, documents in text.parts.items()}
    facts = tokens.corpus_facts(text, tokenizer, {part: counts for part, (_, _, counts) in parts.items()}, digests)
    ids = {part: ids for part, (ids, _, _) in parts.items()}
    return Corpus(
        **ids, facts=facts, tokenizer=tokenizer, starts={part: starts for part, (_, starts, _) in parts.items()}
    )


def _tokens(
    documents: sources.Documents, tokenizer: Tokenizer, digest: "hashlib._Hash"
) -> tuple[Tensor, Tensor, tokens.Counts]:
    content, starts = io.BytesIO(), io.BytesIO()
    counts = tokens.tokenize(documents, tokenizer, content, starts, digest)
    dtype = token_dtype(tokenizer.vocab_size)
    if not counts["tokens"]:  # which torch.frombuffer refuses
        return torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.int64), counts
    return (
        torch.frombuffer(content.getbuffer(), dtype=dtype),
        torch.frombuffer(starts.getbuffer(), dtype=torch.int64),
        counts,
    )


def _task_corpus(name: str, task: Task, document_tokens: int) -> Corpus:
    """Made from seeds within a second or two, so it is never stored; every byte is a token, text or not."""
    parts = {
        part: tasks.task_tokens(task, count, seed, document_tokens=document_tokens)
        for seed, (part, count) in enumerate(tasks.CORPUS_TOKENS.items())
    }
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()
    facts: dict[str, Json] = {"name": name, "sha256": digest, "split": "made of different seeds"}
    facts |= {"tokenizer": "bytes", "vocab_size": 256, "bytes_per_token": 1}
    facts |= {f"{part}_tokens": len(ids) for part, ids in parts.items()}
    starts = {part: torch.arange(0, len(ids), document_tokens) for part, ids in parts.items()}
    return Corpus(parts["train"], parts["valid"], facts, parts["test"], starts=starts)
