"""A corpus as tokens, and the order in which they are read.

`load_corpus` gives the tokens, the tokenizer, where documents begin, and the facts that go into every record; with a store
they are made once and mapped from disk (`token_store.py`). `batches` gives training batches; `packed_batches` the same ones
with the number of each token's document, for attention that stays within a document. Read next: `evaluate.py`.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.lab.config import DataConfig, Task
from alibi_attn.lab.data import sources, tasks, token_store, tokens
from alibi_attn.lab.data.sources import CorpusError as CorpusError
from alibi_attn.lab.data.sources import Part
from alibi_attn.lab.data.tokenizing import ByteTokenizer, Tokenizer, token_dtype
from alibi_attn.records import Json


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to test on, one-dimensional uint8, uint16 or int32, and the facts that records repeat.

    Args:
        train, valid, test: the tokens; no test text unless data.test_share or the corpus itself gives one.
        facts: see `tokens.corpus_facts`.
        tokenizer: gives the text back; `tokenizing.save_tokenizer` writes it.
        starts: for "train", "valid" and "test", where each document begins, int64, rising from 0.
    """

    train: Tensor
    valid: Tensor
    facts: Mapping[str, Json]
    test: Tensor | None = None
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    starts: Mapping[Part, Tensor] = field(default_factory=dict)


def load_corpus(config: DataConfig, store: Path | None = None) -> Corpus:
    """The corpus that the config names.

    Args:
        store: a folder for tokenized texts: each is tokenized once, without ever being in memory whole, and mapped from
            disk; several processes may ask at once. None = tokenize in memory, each time.

    Raises:
        CorpusError: it cannot be read, or stored; the message says why and what to do.
    """
    if task := tasks.parse_corpus(config.corpus):
        return _task_corpus(config.corpus, *task)
    if store is not None:
        folder = token_store.tokenized(config, store)
        return _corpus(folder.tokens, folder.starts, folder.facts, folder.tokenizer)
    files = sources.text_files(config)
    text = sources.hub_text(config) if files is None else sources.split_files(files, config)
    return _in_memory(text)


def read_text(paths: Sequence[Path], tokenizer: Tokenizer | None = None) -> Tensor:
    """All the text of some files and folders as tokens, in memory, unsplit; bytes unless a tokenizer is given.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    return whole_text(paths, tokenizer).valid


def whole_text(paths: Sequence[Path], tokenizer: Tokenizer | None = None) -> Corpus:
    """All the text of some files and folders to test on (`valid`), unsplit, with its facts.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    files = sources.local_files(paths)
    digest = hashlib.sha256()
    found, starts, counts = _tokens(lambda: (sources.file_chunks(file) for file in files), tokenizer, digest)
    facts = tokens.text_facts(tokenizer, counts)
    return Corpus(
        train=found[:0],
        valid=found,
        facts={"name": "text", "sha256": digest.hexdigest(), **facts},
        tokenizer=tokenizer,
        starts={"valid": starts},
    )


def batches(tokens: Tensor, *, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches [batch_size, length + 1] of inputs and their next tokens, from step `start` on.

    The text is cut into pieces of `length` tokens that do not overlap, and every epoch reads all of them in a new
    order. The order is a function of the seed, the length and the batch size alone: methods of one seed see the same
    batches, and a resumed training sees those that an uncut one would have seen.

    Raises:
        CorpusError: fewer tokens than one piece.
    """
    places = _places(num_pieces(tokens, length), length, batch_size, seed, start)
    return (torch.stack([tokens[begin : begin + length + 1] for begin in begins]).long() for begins in places)


def packed_batches(
    tokens: Tensor, starts: Tensor, *, length: int, batch_size: int, seed: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `batches`, each with the documents of its tokens, [batch_size, length + 1] both.

    Documents follow one another, and one that does not fit is cut where its piece ends. With (x, d) the model reads
    x[:, :-1] with segment_ids=d[:, :-1]; the first token of a document has nothing of its own before it, so the loss
    counts the places where d[:, 1:] == d[:, :-1] alone.

    Args:
        starts: where documents begin, `Corpus.starts["train"]`.

    Raises:
        CorpusError: fewer tokens than one piece.
    """
    places = _places(num_pieces(tokens, length), length, batch_size, seed, start)
    return (
        (
            torch.stack([tokens[begin : begin + length + 1] for begin in begins]).long(),
            torch.stack([document_ids(starts, begin, length + 1) for begin in begins]),
        )
        for begins in places
    )


def document_ids(starts: Tensor, begin: int, count: int) -> Tensor:
    """The number of the document that each of `count` tokens from `begin` on belongs to, [count] int64.

    >>> document_ids(torch.tensor([0, 3, 5]), 1, 5)
    tensor([0, 0, 1, 1, 2])
    """
    return torch.searchsorted(starts, torch.arange(begin, begin + count), right=True) - 1


def num_pieces(tokens: Tensor, length: int) -> int:
    """How many training examples of `length` tokens the text has.

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
    tokenizer = tokens.tokenizer_of(text)
    found: dict[Part, Tensor] = {}
    starts: dict[Part, Tensor] = {}
    counts: dict[Part, tokens.Counts] = {}
    digests = tokens.text_digests(text)
    for part, documents in text.parts.items():
        found[part], starts[part], counts[part] = _tokens(documents, tokenizer, digests[part])
    return _corpus(found, starts, tokens.corpus_facts(text, tokenizer, counts, digests), tokenizer)


def _tokens(
    documents: sources.Documents, tokenizer: Tokenizer, digest: "hashlib._Hash"
) -> tuple[Tensor, Tensor, tokens.Counts]:
    content, starts = io.BytesIO(), io.BytesIO()
    counts = tokens.tokenize(documents, tokenizer, content, starts, digest)
    if not counts.tokens:
        return torch.empty(0, dtype=token_dtype(tokenizer.vocab_size)), torch.empty(0, dtype=torch.int64), counts
    return (
        torch.frombuffer(content.getbuffer(), dtype=token_dtype(tokenizer.vocab_size)),
        torch.frombuffer(starts.getbuffer(), dtype=torch.int64),
        counts,
    )


def _task_corpus(name: str, task: Task, document_tokens: int) -> Corpus:
    """Made of seeds in a second or two, so that nothing is stored; a byte is a token, whether it is text or not."""
    parts = {
        part: tasks.task_tokens(task, count, seed, document_tokens=document_tokens)
        for seed, (part, count) in enumerate(tasks.CORPUS_TOKENS.items())
    }
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()
    starts = {part: torch.arange(0, len(found), document_tokens) for part, found in parts.items()}
    facts: dict[str, Json] = {"name": name, "sha256": digest, "split": "made of different seeds"}
    facts |= {"tokenizer": "bytes", "vocab_size": 256, "bytes_per_token": 1}
    facts |= {f"{part}_tokens": len(found) for part, found in parts.items()}
    return _corpus(parts, starts, facts, ByteTokenizer())


def _corpus(
    parts: Mapping[Part, Tensor], starts: Mapping[Part, Tensor], facts: Mapping[str, Json], tokenizer: Tokenizer
) -> Corpus:
    return Corpus(parts["train"], parts["valid"], facts, parts.get("test"), tokenizer, starts)
