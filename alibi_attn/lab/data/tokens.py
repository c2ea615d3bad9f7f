"""A text becomes tokens: read once in chunks, encoded, written, counted and hashed on the way.

Read next: `token_store.py`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alibi_attn.lab.data.sources import Documents, Part, Text
from alibi_attn.lab.data.tokenizing import Tokenizer, make_tokenizer
from alibi_attn.records import Json

_GROUP_BYTES, _GROUP_CHUNKS = 1 << 20, 512  # encoded at once


class Sink(Protocol):
    """As much of a binary file as is written to."""

    def write(self, content: bytes, /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one part of a corpus has; a word is what stands between white space."""

    documents: int
    tokens: int
    bytes: int
    words: int
    lines: int


def tokenizer_of(text: Text) -> Tokenizer:
    """The tokenizer that was asked for, made from the training text.

    Raises:
        CorpusError: it asks for too small a vocabulary.
    """
    train = text.parts["train"]
    return make_tokenizer(
        text.tokenizer, lambda: (chunk for document in train() for chunk in document), text.train_bytes
    )


def tokenize(documents: Documents, tokenizer: Tokenizer, tokens: Sink, starts: Sink, digest: "hashlib._Hash") -> Counts:
    """Write the tokens of some documents, and as int64 where each document that has any begins; hash the text."""
    found = {"documents": 0, "tokens": 0, "bytes": 0, "words": 0, "lines": 0}
    begins = False
    for group in _groups(documents, tokenizer.document_end):
        encoded = tokenizer.encode_all([chunk + end for chunk, end, _ in group])
        for (chunk, _, first), ids in zip(group, encoded, strict=True):
            digest.update(chunk)
            found["documents"] += first
            found["bytes"] += len(chunk)
            found["words"] += len(chunk.decode().split())
            found["lines"] += chunk.count(b"\n")
            begins = begins or first
            if begins and len(ids):
                starts.write(np.int64(found["tokens"]).tobytes())
                begins = False
            tokens.write(ids.numpy().tobytes())
            found["tokens"] += len(ids)
    return Counts(**found)


def text_digests(text: Text) -> dict[Part, "hashlib._Hash"]:
    """Where the SHA-256 of each part begins: training and validation text share one, the test text has its own."""
    shared = hashlib.sha256(text.train_bytes.to_bytes(8, "big"))
    return {"train": shared, "valid": shared, "test": hashlib.sha256()}


def corpus_facts(
    text: Text, tokenizer: Tokenizer, counts: Mapping[Part, Counts], digests: Mapping[Part, "hashlib._Hash"]
) -> dict[str, Json]:
    """What records repeat of a corpus: how much text it is, how it was split, and the hash of all of it."""
    facts: dict[str, Json] = {"name": text.name, "sha256": digests["valid"].hexdigest(), "split": text.split}
    if "test" in counts:
        facts["test_sha256"] = digests["test"].hexdigest()
    for part, count in counts.items():
        facts |= {f"{part}_parts": count.documents, f"{part}_tokens": count.tokens, f"{part}_bytes": count.bytes}
        facts |= {f"{part}_words": count.words, f"{part}_lines": count.lines}
    return facts | text_facts(tokenizer, counts["valid"])


def text_facts(tokenizer: Tokenizer, valid: Counts) -> dict[str, Json]:
    """What turns losses on a text into other units.

    With n nats a token the word-level perplexity is e^(n / words_per_token), and bits per byte are
    n / bytes_per_token / ln 2. WikiText's published perplexities count the end of a line as a word, as the tokenizer
    "words" does: another tokenizer's is e^(n · valid_tokens / (valid_words + valid_lines)).
    """
    return {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "valid_tokens": valid.tokens,
        "valid_words": valid.words,
        "valid_lines": valid.lines,
        "bytes_per_token": 1 if tokenizer.name == "bytes" else valid.bytes / valid.tokens,
        "words_per_token": valid.words / valid.tokens,
    }


def _groups(documents: Documents, document_end: bytes) -> Iterator[list[tuple[bytes, bytes, bool]]]:
    """Chunks to encode at once: (chunk, what its document lacks at its end, whether it begins a document)."""
    group: list[tuple[bytes, bytes, bool]] = []
    size = 0
    for document in documents():
        first = True
        chunk = next(document, b"")
        while True:
            following = next(document, None)
            lacks = document_end if following is None and not chunk.endswith(document_end) else b""
            group.append((chunk, lacks, first))
            size += len(chunk)
            if size >= _GROUP_BYTES or len(group) >= _GROUP_CHUNKS:
                yield group
                group, size = [], 0
            if following is None:
                break
            first, chunk = False, following
    if group:
        yield group
