"""Text: where it comes from, how it is split, in which order it is read.

A corpus is split by whole files wherever it has several, so that no file is half known; its SHA-256 goes into every
record. Tokens are bytes. Read next: `evaluate.py`.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.lab.config import DataConfig
from alibi_attn.records import Json

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_HUB_SPLITS = ("validation", "valid", "test")


class CorpusError(ValueError):
    """A text that is missing, empty, not text, or too short."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to test on, one-dimensional uint8, and the facts that records repeat."""

    train: Tensor
    valid: Tensor
    facts: Mapping[str, Json]


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus that the config names.

    Raises:
        CorpusError: it cannot be read; the message says why and what to do.
    """
    if config.text:
        return _split(_local_files([Path(name) for name in config.text]), config.valid_share, name="text")
    if config.corpus == "python-source":
        return _split(_python_source(), config.valid_share, name="python-source")
    return _hub_corpus(config)


def read_text(paths: Sequence[Path]) -> Tensor:
    """All the text of some files and folders as tokens, one-dimensional uint8, unsplit.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    return _tokens(b"".join(content for _, content in _local_files(paths)))


def batches(tokens: Tensor, *, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless batches [batch_size, length + 1] of inputs and their next tokens, from step `start` on.

    The text is cut into pieces of `length` tokens that do not overlap, and every epoch reads all of them in a new
    order. The order is a function of the seed, the length and the batch size alone: methods of one seed see the same
    batches, and a resumed training sees those that an uncut one would have seen.

    Raises:
        CorpusError: fewer tokens than one piece.
    """
    return _batches(tokens, num_pieces(tokens, length), length, batch_size, seed, start)


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


def _batches(tokens: Tensor, pieces: int, length: int, batch_size: int, seed: int, start: int) -> Iterator[Tensor]:
    drawn = start * batch_size
    epoch, order = -1, torch.empty(0)
    while True:
        rows = []
        for n in range(drawn, drawn + batch_size):
            if n // pieces != epoch:
                epoch = n // pieces
                order = torch.randperm(pieces, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            begin = int(order[n % pieces]) * length
            rows.append(tokens[begin : begin + length + 1])
        yield torch.stack(rows).long()
        drawn += batch_size


def _python_source() -> list[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts)]
    files = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in paths]
    if not any(content for _, content in files):
        raise CorpusError(f"{root} holds no Python source (a trimmed installation); pass your own files in data.text")
    return files


def _local_files(paths: Sequence[Path]) -> list[tuple[str, bytes]]:
    files = []
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist; pass text files, or folders that hold them")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not inside:
                raise CorpusError(f"{path} is a folder without files; pass text files, or folders that hold them")
            files += [(file.relative_to(path).as_posix(), _text_bytes(file)) for file in inside]
        else:
            files.append((path.name, _text_bytes(path)))
    if not any(content for _, content in files):
        raise CorpusError(f"{', '.join(map(str, paths))}: there is no text inside (0 bytes); pass files with text")
    return files


def _text_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if b"\0" in content:
            raise CorpusError(f"{path} is a binary file (it has zero bytes); pass text in UTF-8")
        content.decode("utf-8")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}); pass a file that you may read") from None
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text (byte {error.start} is not); convert it, or pass other files"
        ) from None
    return content


def _split(files: Sequence[tuple[str, bytes]], valid_share: float, *, name: str) -> Corpus:
    """In the order of their names' hashes, every file that still fits into the share; a single file gives its end."""
    files = sorted((file for file in files if file[1]), key=lambda file: hashlib.sha256(file[0].encode()).digest())
    room = valid_share * sum(len(content) for _, content in files)
    if len(files) == 1:
        content = files[0][1]
        cut = content.rfind(b"\n", 0, len(content) - int(room)) + 1 or len(content) - int(room)
        return _corpus([content[:cut]], [content[cut:]], name=name, split="the end of the only file")
    train, valid = [], []
    for _, content in files:
        if len(content) <= room:
            valid.append(content)
            room -= len(content)
        else:
            train.append(content)
    if not valid:
        valid = [train.pop(min(range(len(train)), key=lambda index: len(train[index])))]
    return _corpus(train, valid, name=name, split="whole files")


def _hub_corpus(config: DataConfig) -> Corpus:
    try:
        import datasets
    except ModuleNotFoundError:
        raise CorpusError(
            f'{config.corpus} needs the datasets package; install it with: pip install "alibi-attn[hub]"'
        ) from None
    name, _, subset = config.corpus.removeprefix("hub:").partition(":")
    try:
        loaded = datasets.load_dataset(name, subset or None)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorpusError(
            f"{config.corpus} cannot be loaded ({reason}); check the name (hub:NAME or hub:NAME:CONFIG) and the network"
        ) from None
    if "train" not in loaded or "text" not in loaded["train"].column_names:
        raise CorpusError(
            f'{config.corpus} has no split "train" with a column "text"; save the text to files and pass them in data.text'
        )
    valid_name = next((split for split in _HUB_SPLITS if split in loaded), None)
    train = [str(row).encode() for row in loaded["train"]["text"]]
    if valid_name is None:
        cut = max(1, int(len(train) * (1 - config.valid_share)))
        return _corpus(train[:cut], train[cut:], name=config.corpus, split="the last rows", joint=b"\n")
    valid = [str(row).encode() for row in loaded[valid_name]["text"]]
    return _corpus(train, valid, name=config.corpus, split=f"the corpus' own ({valid_name})", joint=b"\n")


def _corpus(train: Sequence[bytes], valid: Sequence[bytes], *, name: str, split: str, joint: bytes = b"") -> Corpus:
    train_bytes, valid_bytes = joint.join(train), joint.join(valid)
    for part, content in (("train on", train_bytes), ("test on", valid_bytes)):
        if not content:
            raise CorpusError(
                f"the corpus {name} leaves no text to {part}; pass more text, or another data.valid_share"
            )
    digest = hashlib.sha256(len(train_bytes).to_bytes(8, "big") + train_bytes + valid_bytes)
    facts: dict[str, Json] = {
        "name": name,
        "sha256": digest.hexdigest(),
        "split": split,
        "train_parts": len(train),
        "valid_parts": len(valid),
        "train_tokens": len(train_bytes),
        "valid_tokens": len(valid_bytes),
        "bytes_per_token": 1,
    }
    return Corpus(train=_tokens(train_bytes), valid=_tokens(valid_bytes), facts=facts)


def _tokens(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
