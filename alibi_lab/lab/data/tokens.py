"""Turns text into tokens: reads it once in chunks, and encodes, writes, counts and hashes each chunk. Next: `token_store.py`."""

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from alibi_lab.lab.config import Split
from alibi_lab.lab.data.row_files import CorpusError
from alibi_lab.lab.data.sources import Documents, Part, Text
from alibi_lab.lab.data.tokenizing import ByteTokenizer, Tokenizer, make_tokenizer, token_dtype
from alibi_lab.records import Json

# Of one part of a corpus: "documents", "tokens", "bytes", "words" (separated by white space) and "lines".
Counts: TypeAlias = Mapping[str, int]

TOKENIZER = "tokenizer.json"

_GROUP_BYTES, _GROUP_CHUNKS = 1 << 20, 512  # encoded at once


@dataclass(frozen=True)
class Corpus:
    """Tokens to train and test on, one-dimensional uint8, uint16 or int32, and the facts that records repeat.

    Args:
        train, valid, test: the tokens; test is None unless data.test_share or the corpus itself provides one.
        facts: see `tokenize_text`.
        tokenizer: decodes the tokens; its `dump` is stored with them.
        starts: for "train", "valid" and "test", the start of each document, int64, rising from 0.
    """

    train: Tensor
    valid: Tensor
    facts: Mapping[str, Json]
    test: Tensor | None = None
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    starts: Mapping[Part, Tensor] = field(default_factory=dict)

    def to_test_on(self, split: Split) -> "Corpus":
        """This corpus with the text of a split as `valid`, the text that tests read.

        Raises:
            CorpusError: it has no test text.
        """
        if split == "valid":
            return self
        if self.test is None:
            found = 'eval.split is "test" but the corpus has no test text'
            raise CorpusError(f"{found}; pass data.test_share, or eval.split=valid")
        return replace(self, valid=self.test)


def tokenize(
    documents: Documents, tokenizer: Tokenizer, tokens: BinaryIO, starts: BinaryIO, digest: "hashlib._Hash"
) -> Counts:
    """Writes the tokens of documents, and the start of each document that has tokens as int64; hashes the text."""
    counts = collections.Counter(documents=0, tokens=0, bytes=0, words=0, lines=0)
    begins = False
    for group in _groups(documents, tokenizer.document_end):
        encoded = tokenizer.encode_all([chunk + end for chunk, end, _ in group])
        for (chunk, _, first), ids in zip(group, encoded, strict=True):
            digest.update(chunk)
            words = len(chunk.decode().split())
            counts.update(documents=first, bytes=len(chunk), words=words, lines=chunk.count(b"\n"))
            begins = begins or first
            if begins and len(ids):
                starts.write(np.int64(counts["tokens"]).tobytes())
                begins = False
            tokens.write(ids.numpy().tobytes())
            counts["tokens"] += len(ids)
    return counts


def tokenize_text(
    text: Text, opened: Callable[[str], AbstractContextManager[BinaryIO]]
) -> tuple[Tokenizer, dict[str, Json]]:
    """Writes tokenizer.json, and PART.bin and PART.starts.bin for each part, which `corpus_of` reads.

    Args:
        opened: opens a file of this name for writing.

    Returns:
        the tokenizer, made from the training text, and the facts of the corpus for records: its size, its split, and the hash
        of all its text. Training and validation text share one hash, the test text has its own.

    Raises:
        CorpusError: the text has no tokens, or the tokenizer cannot be made.
    """
    train = text.parts["train"]
    tokenizer = make_tokenizer(text.tokenizer, lambda: itertools.chain.from_iterable(train()), text.train_bytes)
    with opened(TOKENIZER) as file:
        file.write(tokenizer.dump())
    shared = hashlib.sha256(text.train_bytes.to_bytes(8, "big"))
    digests, counts = {"train": shared, "valid": shared, "test": hashlib.sha256()}, dict[Part, Counts]()
    for part, documents in text.parts.items():
        with opened(f"{part}.bin") as content, opened(f"{part}.starts.bin") as starts:
            counts[part] = tokenize(documents, tokenizer, content, starts, digests[part])
    facts: dict[str, Json] = {"name": text.name, "sha256": shared.hexdigest(), "split": text.split}
    if "test" in counts:
        facts["test_sha256"] = digests["test"].hexdigest()
    for part, count in counts.items():
        facts |= {f"{part}_{'parts' if name == 'documents' else name}": number for name, number in count.items()}
    return tokenizer, facts | text_facts(tokenizer, counts["valid"])


def corpus_of(
    parts: Iterable[Part], facts: Mapping[str, Json], tokenizer: Tokenizer, read: Callable[[str, torch.dtype], Tensor]
) -> Corpus:
    """The corpus whose parts `tokenize_text` wrote; `read` returns the content of a file."""
    ids = {part: read(f"{part}.bin", token_dtype(tokenizer.vocab_size)) for part in parts}
    starts = {part: read(f"{part}.starts.bin", torch.int64) for part in parts}
    return Corpus(**ids, facts=facts, tokenizer=tokenizer, starts=starts)


def text_facts(tokenizer: Tokenizer, valid: Counts) -> dict[str, Json]:
    """The facts that convert losses on a text into other units.

    At n nats per token, word-level perplexity is e^(n / words_per_token), and bits per byte are n / bytes_per_token / ln 2.
    WikiText's published perplexities count the end of a line as a word, as the tokenizer "words" does; for another tokenizer
    that is e^(n · valid_tokens / (valid_words + valid_lines)).

    Raises:
        CorpusError: the text has no tokens.
    """
    if not valid["tokens"]:
        raise CorpusError(f"the text to test on has no tokens ({valid['bytes']} bytes); pass files with text")
    facts: dict[str, Json] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    facts |= {f"valid_{name}": valid[name] for name in ("tokens", "words", "lines")}
    facts["bytes_per_token"] = 1 if tokenizer.name == "bytes" else valid["bytes"] / valid["tokens"]
    return facts | {"words_per_token": valid["words"] / valid["tokens"]}


def _groups(documents: Documents, document_end: bytes) -> Iterator[list[tuple[bytes, bytes, bool]]]:
    """Chunks to encode together: (chunk, the bytes to append to it, whether it is the first of a document)."""
    group: list[tuple[bytes, bytes, bool]] = []
    size = 0
    for document in documents():
        chunks = itertools.pairwise(itertools.chain([next(document, b"")], document, [None]))
        for number, (chunk, following) in enumerate(chunks):
            assert chunk is not None
            missing = document_end if following is None and not chunk.endswith(document_end) else b""
            group.append((chunk, missing, number == 0))
            size += len(chunk)
            if size >= _GROUP_BYTES or len(group) >= _GROUP_CHUNKS:
                yield group
                group, size = [], 0
    if group:
        yield group
