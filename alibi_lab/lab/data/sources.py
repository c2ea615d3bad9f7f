"""Reads a text corpus in chunks, before tokenization, and splits it into training, validation and test text.

A corpus is files, or a data set of the hub. Files of JSON, JSON Lines, CSV and Parquet are tables: each row is a document. With
several files, each file goes to one part as a whole, so that no test file is partly trained on. Next: `tokenizing.py`.
"""

import csv
import functools
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from alibi_attn.strict_json import NO_CHARACTER, lone_surrogate
from alibi_lab.lab.config import DataConfig

Part: TypeAlias = Literal["train", "valid", "test"]
# Of documents, one after the other; True for the first chunk of a document.
Chunks: TypeAlias = Iterator[tuple[bytes, bool]]
Documents: TypeAlias = Callable[[], Chunks]  # each call reads again
Shares: TypeAlias = Mapping[Part, float]  # of the text for "valid" and for "test"
Rows: TypeAlias = Iterator[Mapping[str, object]]

CHUNK_BYTES = 1 << 16  # read at once; chunks end at a line end,
LINE_BYTES = 1 << 20  # or, in lines longer than this, between two words or at least two characters

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_OWN_SPLIT = re.compile(r"(?<![a-z])(train|valid|test)(?:ing|ation)?(?![a-z])")
_ENCODING = "utf-8-sig"  # spreadsheets write a byte order mark


class CorpusError(ValueError):
    """A text that is missing, empty, not text, or too short; or tokens that are damaged or do not fit."""


@dataclass(frozen=True)
class Text:
    """A corpus before tokenization.

    Args:
        split: a description of the split.
        parts: the documents for training, for validation and, optionally, for testing.
        sizes: the bytes of each part; empty if they are not known yet.
    """

    split: str
    parts: Mapping[Part, Documents]
    sizes: Mapping[Part, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus, or a range of its bytes. Its name decides which part it belongs to."""

    name: str
    path: Path
    num_bytes: int
    field: str = ""
    begin: int = 0

    def documents(self) -> Chunks:
        """Its documents: the rows of a table, or the whole file."""
        if is_table(self.path):
            return _with_newlines(texts(self.path, self.field))
        return ((chunk, number == 0) for number, chunk in enumerate(file_chunks(self)))


def text_files(config: DataConfig) -> list[TextFile]:
    """The nonempty files of a corpus, with the errors of `local_files`; none for a hub corpus."""
    if config.corpus.startswith("hub:"):
        return []
    return local_files([Path(path) for path in config.text], config.text_field) if config.text else _python_source()


def local_files(paths: Sequence[Path], text_field: str = "") -> list[TextFile]:
    """The given files and all files inside the given folders, without empty ones.

    Args:
        text_field: the text's field in files with rows.

    Raises:
        CorpusError: files are missing or contain no text.
    """
    files = []
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist; pass text files, or folders with text files")
        inside = [path]
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not inside:
                raise CorpusError(f"{path} is a folder without files; pass text files, or folders with text files")
        files += _nonempty(inside, path if path.is_dir() else path.parent, text_field)
    if not files:
        raise CorpusError(f"{', '.join(map(str, paths))}: there is no text inside (0 bytes); pass files with text")
    for name in (ascii(str(file.path)) for file in files if lone_surrogate(str(file.path))):
        raise CorpusError(f"{name} is a name that is not UTF-8, which no record can hold; rename it")
    for file in files:  # most files that are not text show it at their start: report it before hours of work
        next(file.documents(), None)
    return files


def documents_of(files: Sequence[TextFile]) -> Documents:
    """The documents of the files, in order."""
    return lambda: (chunk for file in files for chunk in file.documents())


def split_text(config: DataConfig, files: Sequence[TextFile]) -> Text:
    """The corpus, split, with the sizes of its parts, which may need a pass over all of it; files as of `text_files`.

    Raises:
        CorpusError: a part would be empty, the names of files are ambiguous, or a hub corpus cannot be loaded.
    """
    shares: Shares = {"valid": config.valid_share, "test": config.test_share}
    text = _split_files(files, shares, by_name=bool(config.text)) if files else _split_hub(config.corpus, shares)
    sizes = text.sizes or {part: sum(len(chunk) for chunk, _ in read()) for part, read in text.parts.items()}
    for part in (part for part, size in sizes.items() if not size):
        purpose = {"train": "train on", "valid": "test on", "test": "test on at the end"}[part]
        taken: Part = "test" if part == "test" else "valid"
        share, field, needed = shares[taken], f"data.{taken}_share", ""
        if share and part != "train":
            needed = f" (a test at n tokens needs about {2 / share:.3g}·n tokens in all)"
        found = f"{', '.join(config.text) or 'the corpus ' + config.corpus} has {sum(sizes.values()):,} bytes of text"
        advice = f"pass more text{needed}, or another {field}"
        raise CorpusError(f"{found}, and {field}={share:g} leaves none to {purpose}; {advice}")
    return replace(text, sizes=sizes)


def _split_files(files: Sequence[TextFile], shares: Shares, *, by_name: bool) -> Text:
    """Splits files by their names, or whole files by the hashes of their names, or cuts a single file near its end."""
    split, inside = "whole files", _own_split(files) if by_name else None
    if inside is not None:
        split = f"the files' own ({', '.join(inside)})"
        if "valid" not in inside:
            inside["valid"] = inside.pop("test")
    elif len(files) > 1:
        inside = _whole_files(files, shares)
    elif is_table(files[0].path):
        rows = functools.partial(texts, files[0].path, files[0].field)
        return _last_rows(rows, sum(1 for _ in rows()), shares)
    else:
        split, file, size = "the end of the only file", files[0], files[0].num_bytes
        ends = _ends(shares, lambda share: _line_start(file, size - int(share * size)) if share else size)
        inside = {part: [replace(file, begin=begin, num_bytes=end - begin)] for part, (begin, end) in ends.items()}
    parts = {part: documents_of(files) for part, files in inside.items()}
    if any(is_table(file.path) for file in files):
        return Text(split, parts)
    return Text(split, parts, {part: sum(file.num_bytes for file in files) for part, files in inside.items()})


def _whole_files(files: Sequence[TextFile], shares: Shares) -> dict[Part, list[TextFile]]:
    """Files by the hashes of their names; each part gets at least one of them."""
    order = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    total = sum(file.num_bytes for file in order)
    room: dict[Part, float] = {part: share * total for part, share in shares.items() if share} | {"train": math.inf}
    parts: dict[Part, list[TextFile]] = {part: [] for part in ("train", *room)}
    for file in order:
        part = next(part for part in room if file.num_bytes <= room[part])
        room[part] -= file.num_bytes
        parts[part].append(file)
    train = parts["train"]
    for inside in parts.values():
        if train and not inside:
            inside.append(min(train, key=lambda file: file.num_bytes))
            train.remove(inside[0])
    return parts


def file_chunks(file: TextFile) -> Iterator[bytes]:
    """The text of a file in chunks that end at the end of a line, a word or at least a character.

    Raises:
        CorpusError: the file cannot be read or is not UTF-8 text.
    """
    path, begin, left, pending = file.path, file.begin, file.num_bytes, b""
    try:
        with path.open("rb") as stream:
            stream.seek(begin)
            while left:
                block = stream.read(min(CHUNK_BYTES, left))
                if not block:
                    found = f"{path} became shorter while it was read"
                    raise CorpusError(f"{found}; run again when no process writes to it")
                left -= len(block)
                pending += block
                if cut := _cut(pending) if left else len(pending):
                    _check_text(path, pending[:cut], begin)
                    yield pending[:cut]
                    begin, pending = begin + cut, pending[cut:]
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}); pass a file that you may read") from None


def _split_hub(corpus: str, shares: Shares) -> Text:
    """A corpus of the Hugging Face hub. Each row is a document and ends with a newline."""
    try:
        import datasets
    except ModuleNotFoundError:
        advice = 'install it with: pip install ".[hub]" in a clone'
        raise CorpusError(f"{corpus} needs the datasets package; {advice}") from None
    name, _, subset = corpus.removeprefix("hub:").partition(":")
    try:
        loaded = datasets.load_dataset(name, subset or None)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "check the name (hub:NAME or hub:NAME:CONFIG) and the network"
        raise CorpusError(f"{corpus} cannot be loaded ({reason}); {advice}") from None
    if "train" not in loaded or "text" not in loaded["train"].column_names:
        found = f'{corpus} has no split "train" with a column "text"'
        raise CorpusError(f"{found}; save the text to files and pass them in data.text")
    valid = next((name for name in ("validation", "valid", "test") if name in loaded), None)
    if valid is None:
        return _last_rows(_hub_texts(loaded["train"]), len(loaded["train"]), shares)
    splits: dict[Part, str] = {"train": "train", "valid": valid}
    if valid != "test" and "test" in loaded:
        splits["test"] = "test"
    parts: dict[Part, Documents] = {part: _rows(_hub_texts(loaded[name])) for part, name in splits.items()}
    return Text(f"the corpus' own ({valid})", parts)


def _python_source() -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not (files := _nonempty(paths, root)):
        raise CorpusError(f"{root} holds no Python source (a trimmed installation); pass your own files in data.text")
    return files


def _nonempty(paths: Sequence[Path], root: Path, text_field: str = "") -> list[TextFile]:
    files = [TextFile(path.relative_to(root).as_posix(), path, path.stat().st_size, text_field) for path in paths]
    return [file for file in files if file.num_bytes]


def _own_split(files: Sequence[TextFile]) -> dict[Part, list[TextFile]] | None:
    """The split by file names if every file is named after one part and "train" is among them; partial naming is an error."""
    named: dict[Part, list[TextFile]] = {"train": [], "valid": [], "test": []}
    unnamed: list[TextFile] = []
    for file in files:
        words = set(_OWN_SPLIT.findall(Path(file.name).name.lower()))
        part: Part | None = next((part for part in named if words == {part}), None)
        (unnamed if part is None else named[part]).append(file)
    if not (named["train"] and named["valid"]) and (unnamed or not named["train"] or not named["test"]):
        return None
    if unnamed:
        train, valid, other = named["train"][0].name, named["valid"][0].name, unnamed[0].name
        found = f"some files are named train and valid ({train}, {valid}) but {other} is neither"
        raise CorpusError(f"{found}; pass only the files that are meant in data.text, or rename them")
    return {part: inside for part, inside in named.items() if inside}


def _ends(shares: Shares, start: Callable[[float], int]) -> dict[Part, tuple[int, int]]:
    """The first and the end of each part of a text whose last shares are for testing; `start` is where the last share begins."""
    valid, test, end = start(shares["valid"] + shares["test"]), start(shares["test"]), start(0.0)
    return {"train": (0, valid), "valid": (valid, test), **({"test": (test, end)} if shares["test"] else {})}


def _line_start(file: TextFile, place: int) -> int:
    """The start of the line that contains `place`; in a file of one line, the start of the character."""
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        newline = content.rfind(b"\n", 0, place) + 1
        return newline or (place if place == file.num_bytes else _character(content, place))


def _cut(pending: bytes) -> int:
    """The number of bytes that form a complete chunk; 0 = read more first."""
    if cut := pending.rfind(b"\n") + 1:
        return cut
    return 0 if len(pending) < LINE_BYTES else pending.rfind(b" ") + 1 or _character(pending, len(pending) - 1)


def _character(content: bytes | mmap.mmap, place: int) -> int:
    """The first byte of the character at `place`; continuation bytes are 10xxxxxx."""
    while place and content[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _check_text(path: Path, content: bytes, offset: int) -> None:
    if b"\0" in content:
        raise CorpusError(f"{path} is a binary file (it has zero bytes); pass text in UTF-8")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise CorpusError(f"{path} is not UTF-8 text (byte {byte} is not); convert it, or pass other files") from None


def _hub_texts(rows: Any) -> Callable[[], Iterator[bytes]]:
    """Reads the column "text" of a `datasets.Dataset`."""
    batches = functools.partial(rows.iter, batch_size=1000)
    return lambda: (str("" if text is None else text).encode() for batch in batches() for text in batch["text"])


def _last_rows(rows: Callable[[], Iterator[bytes]], count: int, shares: Shares) -> Text:
    ends = _ends(shares, lambda share: max(1, int(count * (1 - share))))
    return Text("the last rows", {part: _rows(rows, begin, end) for part, (begin, end) in ends.items()})


def _rows(rows: Callable[[], Iterator[bytes]], begin: int = 0, end: int | None = None) -> Documents:
    return lambda: _with_newlines(itertools.islice(rows(), begin, end))


def _with_newlines(rows: Iterator[bytes]) -> Chunks:
    """Rows as documents; each except the last one ends with a newline."""
    for row, following in itertools.pairwise(itertools.chain(rows, [None])):
        assert row is not None
        yield row if following is None or row.endswith(b"\n") else row + b"\n", True


def is_table(path: Path) -> bool:
    """Whether the file has rows, by its suffix."""
    return path.suffix.lower() in _READERS


def texts(path: Path, field: str) -> Iterator[bytes]:
    """The text of each row, in UTF-8.

    Args:
        field: the name of the text's field; "" means "text".

    Raises:
        CorpusError: the file cannot be read, has no such field, or the field is not text.
    """
    kind, field = path.suffix.lower(), field or "text"
    try:
        for number, row in enumerate(_READERS[kind](path), 1):
            place = f"row {number} of {path}"
            if not isinstance(row, Mapping) or field not in row:
                names = ", ".join(map(str, row)) if isinstance(row, Mapping) else "no fields"
                advice = "pass the field of the text with --text-field (data.text_field)"
                raise CorpusError(f"{place} has no field {field!r}, but {names}; {advice}")
            text = row[field]
            if not isinstance(text, str):
                raise CorpusError(f"{place} has {type(text).__name__} in the field {field!r}, not text")
            if half := lone_surrogate(text):
                raise CorpusError(f"{place} has {half}, {NO_CHARACTER}; correct it, or leave the row out")
            yield text.encode()
    except CorpusError:
        raise
    except OSError as error:
        raise CorpusError(str(error)) from None
    # Also numbers of 4,301 digits, and lists too deep for json.
    except (ValueError, RecursionError, csv.Error) as error:
        raise CorpusError(f"{path} is not {kind[1:].upper()} in UTF-8 ({error}); pass another file") from None


def _jsonl(path: Path) -> Rows:
    with path.open(encoding=_ENCODING) as file:
        yield from (json.loads(line) for line in file if line.strip())


def _json(path: Path) -> Rows:
    """A list of objects, or one object per line."""
    try:
        content = json.loads(path.read_text(encoding=_ENCODING))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        yield from _jsonl(path)
        return
    yield from content if isinstance(content, Sequence) and not isinstance(content, str) else [content]


def _csv(path: Path) -> Rows:
    csv.field_size_limit((1 << 31) - 1)  # a field is a document; by default csv refuses more than 128 KiB
    with path.open(encoding=_ENCODING, newline="") as file:
        yield from csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")


def _parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise CorpusError(
            f'{path} needs the pyarrow package; install it with: pip install ".[hub]" in a clone'
        ) from None
    try:
        for batch in parquet.ParquetFile(path, page_checksum_verification=True).iter_batches(batch_size=1000):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:  # damaged pages are an OSError without a number
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise CorpusError(f"{path} is not Parquet, or damaged ({reason}); pass another file") from None


_READERS = {".json": _json, ".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
