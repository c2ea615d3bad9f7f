"""Where text comes from and how it is split: a corpus before it is tokenised, read in chunks and never held whole.

Whole files go to the training, the validation or the test text wherever there are several, so that no file is half known.
Read next: `tokenizing.py`.
"""

import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from alibi_attn.lab.config import DataConfig

Part: TypeAlias = Literal["train", "valid", "test"]
Documents: TypeAlias = Callable[[], Iterator[Iterator[bytes]]]  # read anew at each call; each document in chunks

CHUNK_BYTES = 1 << 16  # read at once; chunks end at the end of a line,
LINE_BYTES = 1 << 20  # or, where a line is longer than this, between two words or at least two characters

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_HUB_SPLITS = ("validation", "valid", "test")
_OWN_SPLIT = re.compile(r"(?<![a-z])(train|valid|test)(?:ing|ation)?(?![a-z])")


class CorpusError(ValueError):
    """A text that is missing, empty, not text, or too short; tokens that are damaged or do not fit."""


@dataclass(frozen=True)
class Text:
    """A corpus before it is tokenised.

    Args:
        name: "text", "python-source", "hub:NAME".
        split: how it was split, in words.
        parts: the documents to train on, to validate on, and perhaps to test on.
        train_bytes, num_bytes: of the text to train on, and of all of it.
        tokenizer: the name of the one to use.
    """

    name: str
    split: str
    parts: Mapping[Part, Documents]
    train_bytes: int
    num_bytes: int
    tokenizer: str


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus; its name decides where it goes."""

    name: str
    path: Path
    num_bytes: int


class Rows(Protocol):
    """As much of `datasets.Dataset` as is read."""

    column_names: Sequence[str]

    def __len__(self) -> int: ...

    def iter(self, batch_size: int) -> Iterator[Mapping[str, Sequence[object]]]: ...


def text_files(config: DataConfig) -> list[TextFile] | None:
    """The files that a config names, none of them empty; None for a corpus of the hub.

    Raises:
        CorpusError: they are missing, or there is no text inside.
    """
    if config.corpus.startswith("hub:"):
        return None
    return local_files([Path(name) for name in config.text]) if config.text else _python_source()


def local_files(paths: Sequence[Path]) -> list[TextFile]:
    """Files, and the files inside of folders, that are not empty.

    Raises:
        CorpusError: they are missing, or there is no text inside.
    """
    files = []
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist; pass text files, or folders that hold them")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not inside:
                raise CorpusError(f"{path} is a folder without files; pass text files, or folders that hold them")
            files += [TextFile(file.relative_to(path).as_posix(), file, file.stat().st_size) for file in inside]
        else:
            files.append(TextFile(path.name, path, path.stat().st_size))
    if not any(file.num_bytes for file in files):
        raise CorpusError(f"{', '.join(map(str, paths))}: there is no text inside (0 bytes); pass files with text")
    files = [file for file in files if file.num_bytes]
    for file in files:
        next(file_chunks(file))  # what is no text is mostly not so from the beginning: say it before hours of work
    return files


def split_files(files: Sequence[TextFile], config: DataConfig) -> Text:
    """Files as a corpus: as their names say, or whole files by the hashes of their names, or the end of a single file.

    Raises:
        CorpusError: a part would be empty, or the names say two things.
    """
    if config.text and (own := _own_split(files)) is not None:
        return _text_of_files(config, f"the files' own ({', '.join(own)})", _valid_from_test(own))
    if len(files) == 1:
        return _ends_of_file(files[0], config)
    order = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    total = sum(file.num_bytes for file in order)
    room: dict[Part, float] = {"valid": config.valid_share * total, "test": config.test_share * total}
    parts: dict[Part, list[TextFile]] = {"train": [], "valid": [], "test": []}
    for file in order:
        part = next((part for part in room if file.num_bytes <= room[part]), None)
        if part is not None:
            room[part] -= file.num_bytes
        parts[part or "train"].append(file)
    train = parts["train"]
    for part in room:
        if not parts[part] and train and (part == "valid" or config.test_share):
            parts[part] = [train.pop(min(range(len(train)), key=lambda index: train[index].num_bytes))]
    if not config.test_share:
        del parts["test"]
    return _text_of_files(config, "whole files", parts)


def file_chunks(file: TextFile, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The text of a file, or of a stretch of it, in chunks that end where lines, words or at least characters end.

    Raises:
        CorpusError: it cannot be read, or is not text in UTF-8.
    """
    try:
        with file.path.open("rb") as stream:
            stream.seek(begin)
            left, pending = (file.num_bytes if end is None else end) - begin, b""
            while left:
                block = stream.read(min(CHUNK_BYTES, left))
                if not block:
                    raise CorpusError(f"{file.path} became shorter while it was read; run again when nobody writes it")
                left -= len(block)
                pending += block
                cut = _cut(pending) if left else len(pending)
                if cut:
                    _check_text(file.path, pending[:cut], begin)
                    yield pending[:cut]
                    begin, pending = begin + cut, pending[cut:]
    except OSError as error:
        raise CorpusError(f"{file.path} cannot be read ({error.strerror}); pass a file that you may read") from None


def hub_text(config: DataConfig) -> Text:
    """A corpus of the hub, row by row; a row is a document, and a new line follows it unless it ends in one.

    Raises:
        CorpusError: it cannot be loaded, or has no text.
    """
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
    valid = next((split for split in _HUB_SPLITS if split in loaded), None)
    if valid is None:
        return _last_rows(config, loaded["train"])
    parts: dict[Part, Documents] = {
        "train": _rows(loaded["train"], 0, len(loaded["train"])),
        "valid": _rows(loaded[valid], 0, len(loaded[valid])),
    }
    if valid != "test" and "test" in loaded:
        parts["test"] = _rows(loaded["test"], 0, len(loaded["test"]))
    return _hub_text(config, f"the corpus' own ({valid})", parts)


def check_part(name: str, part: Part, num_bytes: int) -> None:
    """Raises CorpusError where a part of a corpus is empty."""
    if not num_bytes:
        share = "data.test_share" if part == "test" else "data.valid_share"
        purpose = {"train": "train on", "valid": "test on", "test": "test on at the end"}[part]
        raise CorpusError(f"the corpus {name} leaves no text to {purpose}; pass more text, or another {share}")


def _python_source() -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [TextFile(path.relative_to(root).as_posix(), path, path.stat().st_size) for path in paths]
    files = [file for file in files if file.num_bytes]
    if not files:
        raise CorpusError(f"{root} holds no Python source (a trimmed installation); pass your own files in data.text")
    return files


def _own_split(files: Sequence[TextFile]) -> dict[Part, list[TextFile]] | None:
    """Where every file is named after one part, and one of them "train": what is named only half may be a slip."""
    named: dict[Part, list[TextFile]] = {"train": [], "valid": [], "test": []}
    unnamed: list[TextFile] = []
    for file in files:
        words = set(_OWN_SPLIT.findall(Path(file.name).name.lower()))
        part: Part | None = next((part for part in named if words == {part}), None)
        (unnamed if part is None else named[part]).append(file)
    if not (named["train"] and named["valid"]) and (unnamed or not named["train"] or not named["test"]):
        return None
    if unnamed:
        raise CorpusError(
            f"some files are named train and valid ({named['train'][0].name}, {named['valid'][0].name}) but "
            f"{unnamed[0].name} is neither; pass only the files that are meant in data.text, or rename them"
        )
    return {part: inside for part, inside in named.items() if inside}


def _valid_from_test(parts: dict[Part, list[TextFile]]) -> dict[Part, list[TextFile]]:
    return parts if "valid" in parts else {"train": parts["train"], "valid": parts["test"]}


def _text_of_files(config: DataConfig, split: str, parts: Mapping[Part, Sequence[TextFile]]) -> Text:
    num_bytes = {part: sum(file.num_bytes for file in files) for part, files in parts.items()}
    for part in parts:
        check_part(config.corpus, part, num_bytes[part])
    reading: dict[Part, Documents] = {part: _files(files) for part, files in parts.items()}
    return Text(config.corpus, split, reading, num_bytes["train"], sum(num_bytes.values()), config.tokenizer)


def _ends_of_file(file: TextFile, config: DataConfig) -> Text:
    size = file.num_bytes
    shares = (config.valid_share + config.test_share, config.test_share)
    valid, test = (_line_start(file, size - int(share * size)) if share else size for share in shares)
    places: dict[Part, tuple[int, int]] = {"train": (0, valid), "valid": (valid, test)}
    if config.test_share:
        places["test"] = (test, size)
    for part, (begin, end) in places.items():
        check_part(config.corpus, part, end - begin)
    parts: dict[Part, Documents] = {part: _stretch(file, begin, end) for part, (begin, end) in places.items()}
    return Text(config.corpus, "the end of the only file", parts, valid, size, config.tokenizer)


def _line_start(file: TextFile, place: int) -> int:
    """Where the line begins that `place` is in; without lines, the character."""
    with file.path.open("rb") as stream:
        end = place
        while end:
            begin = max(0, end - CHUNK_BYTES)
            stream.seek(begin)
            found = stream.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        if place == file.num_bytes:
            return place
        before = min(3, place)
        stream.seek(place - before)
        return place - before + _character(stream.read(before + 1), before)


def _cut(pending: bytes) -> int:
    """How much may be given away before the rest is read; 0 = nothing yet."""
    if cut := pending.rfind(b"\n") + 1:
        return cut
    return 0 if len(pending) < LINE_BYTES else pending.rfind(b" ") + 1 or _character(pending, len(pending) - 1)


def _character(content: bytes, place: int) -> int:
    """The first byte of the character at `place`; bytes that continue one are 10xxxxxx."""
    while place and content[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _check_text(path: Path, content: bytes, offset: int) -> None:
    if b"\0" in content:
        raise CorpusError(f"{path} is a binary file (it has zero bytes); pass text in UTF-8")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text (byte {offset + error.start} is not); convert it, or pass other files"
        ) from None


def _files(files: Sequence[TextFile]) -> Documents:
    return lambda: (file_chunks(file) for file in files)


def _stretch(file: TextFile, begin: int, end: int) -> Documents:
    return lambda: iter([file_chunks(file, begin, end)])


def _last_rows(config: DataConfig, rows: Rows) -> Text:
    valid, test = (
        max(1, int(len(rows) * (1 - share))) for share in (config.valid_share + config.test_share, config.test_share)
    )
    parts: dict[Part, Documents] = {"train": _rows(rows, 0, valid), "valid": _rows(rows, valid, test)}
    if config.test_share:
        parts["test"] = _rows(rows, test, len(rows))
    return _hub_text(config, "the last rows", parts)


def _rows(rows: Rows, begin: int, end: int) -> Documents:
    last = end - 1

    def documents() -> Iterator[Iterator[bytes]]:
        texts = (text for batch in rows.iter(batch_size=1000) for text in batch["text"])
        for number, text in enumerate(itertools.islice(texts, begin, last + 1), begin):
            content = b"" if text is None else str(text).encode()
            yield iter([content if number == last or content.endswith(b"\n") else content + b"\n"])

    return documents


def _hub_text(config: DataConfig, split: str, parts: Mapping[Part, Documents]) -> Text:
    num_bytes = {part: sum(len(chunk) for rows in read() for chunk in rows) for part, read in parts.items()}
    for part in parts:
        check_part(config.corpus, part, num_bytes[part])
    return Text(config.corpus, split, parts, num_bytes["train"], sum(num_bytes.values()), config.tokenizer)
