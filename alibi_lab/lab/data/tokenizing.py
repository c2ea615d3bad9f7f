"""Tokenizers: bytes, whitespace-separated words (as in WikiText), byte-level BPE; built from the training text only.

Read next: `corpus.py`.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tokenizers
import torch
from torch import Tensor

from alibi_attn.strict_json import NO_CHARACTER, lone_surrogate, sealed
from alibi_lab.lab.data.sources import CorpusError
from alibi_lab.lab.sealed_folder import read_sealed

SCHEMA = 1
SAMPLE_BYTES = 16 << 20  # evenly spread sample for the BPE; more text hardly changes its merges
EOS, UNK = "<eos>", "<unk>"  # as in WikiText

Ids: TypeAlias = Tensor | Sequence[int]

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # for ids beyond the tokenizer: the model's vocabulary may be larger


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Turns text into tokens and back.

    Args:
        name: the value of data.tokenizer.
        vocab_size: the number of tokens.
        encode_all: texts as tokens, one-dimensional, uint8, uint16 or int32.
        decode: tokens as bytes. The text of ids[:n + 1] starts with the text of ids[:n], so a program that prints while it
            generates can decode all ids again and print only the new text.
        content: what its file has in addition to its name.
        document_end: the bytes that every document of a corpus must end with.
    """

    name: str
    vocab_size: int
    encode_all: Callable[[Sequence[bytes]], list[Tensor]]
    decode: Callable[[Ids], bytes]
    content: Mapping[str, object]
    document_end: bytes = b""

    def encode(self, text: str | bytes) -> Tensor:
        """One text as tokens."""
        return self.encode_all([_str(text).encode() if isinstance(text, str) else text])[0]

    def dump(self) -> bytes:
        """The file of the tokenizer, equal for equal tokenizers: `load_tokenizer`."""
        return sealed({"schema": SCHEMA, "tokenizer": self.name, **self.content})


def byte_tokenizer() -> Tokenizer:
    """A token is a byte.

    >>> byte_tokenizer().encode("ab").tolist()
    [97, 98]
    """

    def encode_all(texts: Sequence[bytes]) -> list[Tensor]:
        return [torch.from_numpy(np.frombuffer(bytearray(text), np.uint8)) for text in texts]

    return Tokenizer("bytes", 256, encode_all, _joined([bytes([index]) for index in range(256)]), {})


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Splits at whitespace; the end of a line is also a token.

    Args:
        words: the vocabulary, most frequent first (as adaptive cutoffs need it), with `EOS` and `UNK`.
    """
    index = {word: number for number, word in enumerate(words)}
    unknown, dtype = index[UNK], token_dtype(len(words))

    def encode_all(texts: Sequence[bytes]) -> list[Tensor]:
        return [torch.tensor([index.get(word, unknown) for word in _words(_str(one))], dtype=dtype) for one in texts]

    def decode(ids: Ids) -> bytes:
        found = (words[index] if index < len(words) else _UNKNOWN for index in _integers(ids))
        return re.sub(" ?\n ?", "\n", " ".join("\n" if word == EOS else word for word in found)).encode()

    return Tokenizer("words", len(words), encode_all, decode, {"words": words}, document_end=b"\n")


def bpe_tokenizer(name: str, model: str) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2), or another tokenizer of Hugging Face's `tokenizers`.

    Byte-level BPE can encode any text and decodes exactly; the others decode with the library.

    Args:
        name: the value of data.tokenizer; "bpe:SIZE" may have fewer tokens if the text is short.
        model: a `tokenizers.Tokenizer` as JSON.
    """
    library = tokenizers.Tokenizer.from_str(model)
    size: int = library.get_vocab_size()

    def encode_all(texts: Sequence[bytes]) -> list[Tensor]:
        encodings = library.encode_batch_fast([_str(text) for text in texts], add_special_tokens=False)
        return [torch.tensor(encoding.ids, dtype=token_dtype(size)) for encoding in encodings]

    def decode(ids: Ids) -> bytes:
        text: str = library.decode(_integers(ids), skip_special_tokens=False)
        return text.rstrip(_UNKNOWN).encode()  # bytes of an unfinished character

    if isinstance(library.decoder, tokenizers.decoders.ByteLevel) or name.startswith("bpe:"):
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        pieces = (str(library.id_to_token(index)) for index in range(size))
        added = {str(token.content) for token in library.get_added_tokens_decoder().values()}
        known = [each.encode() if each in added else bytes(map(byte_of.__getitem__, each)) for each in pieces]
        return Tokenizer(name, size, encode_all, _joined(known), {"model": model})
    return Tokenizer(name, size, encode_all, decode, {"model": model})


def make_tokenizer(name: str, chunks: Callable[[], Iterator[bytes]], num_bytes: int) -> Tokenizer:
    """Builds the tokenizer of that name ("bytes", "words", "bpe:SIZE", or a tokenizer file) for a training text.

    The text is read at most once.

    Args:
        chunks: reads the training text from its beginning.
        num_bytes: size of the training text; if it exceeds `SAMPLE_BYTES`, BPE uses evenly spread chunks.

    Raises:
        CorpusError: a BPE with fewer than 256 tokens, or a tokenizer file that cannot be read.
    """
    if name == "bytes":
        return byte_tokenizer()
    if name == "words":
        counts = collections.Counter({EOS: 0, UNK: 0})
        for chunk in chunks():
            counts.update(_words(chunk.decode()))
        return word_tokenizer(sorted(counts, key=lambda word: (-counts[word], word)))
    if not name.startswith("bpe:"):
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            return bpe_tokenizer(name, path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises nothing more specific
            reason = error.strerror if isinstance(error, OSError) else error
            found = f"{path} is not a tokenizer that can be read ({reason})"
            raise CorpusError(f"data.tokenizer is {name!r} but {found}") from None
    size = int(name.removeprefix("bpe:"))
    if size < 256:
        found = f"data.tokenizer is {name!r} but byte-level BPE begins with 256 tokens, one per byte"
        raise CorpusError(f"{found}; pass bpe:256 or more")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=_byte_characters())
    tokenizer.train_from_iterator((chunk.decode() for chunk in _sample(chunks(), num_bytes)), trainer)
    return bpe_tokenizer(name, tokenizer.to_str())


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer whose `dump` the file holds.

    Raises:
        CorpusError: the file does not exist, is not a tokenizer, or is from another version.
    """
    try:
        data = read_sealed(path.parent, path.name, schema=SCHEMA)
        if data["tokenizer"] == "bytes":
            return byte_tokenizer()
        if isinstance(words := data.get("words"), list):
            return word_tokenizer(words)
        return bpe_tokenizer(str(data["tokenizer"]), str(data["model"]))
    except (ValueError, KeyError, TypeError) as error:
        again = "it is next to the tokens and in every checkpoint: delete the folder it is in and run again"
        raise CorpusError(f"{path} is not a tokenizer, or damaged ({error}); {again}") from None


def _joined(known: Sequence[bytes]) -> Callable[[Ids], bytes]:
    """Decodes tokens whose bytes are known."""
    unknown = _UNKNOWN.encode()
    return lambda ids: b"".join(known[index] if index < len(known) else unknown for index in _integers(ids))


def token_dtype(vocab_size: int) -> torch.dtype:
    """The smallest of uint8, uint16 and int32 that holds every token."""
    return torch.uint8 if vocab_size <= 1 << 8 else torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def _words(text: str) -> list[str]:
    return text.replace("\n", f" {EOS} ").split()


def _sample(chunks: Iterable[bytes], num_bytes: int) -> Iterator[bytes]:
    share = min(1.0, SAMPLE_BYTES / max(1, num_bytes))
    read, taken = 0, 0
    for chunk in chunks:
        read += len(chunk)
        if taken < share * read:
            taken += len(chunk)
            yield chunk


def _byte_characters() -> list[str]:
    """The character that represents each byte in byte-level BPE: itself if printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _integers(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else np.asarray(ids, dtype=np.int64).tolist()


def _str(text: str | bytes) -> str:
    if isinstance(text, str):
        if half := lone_surrogate(text):
            raise CorpusError(f"the text has {half}, {NO_CHARACTER}; correct it")
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(f"the text is not UTF-8 (byte {error.start} is not); convert it, or use bytes") from None
