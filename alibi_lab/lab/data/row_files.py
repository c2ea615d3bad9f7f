"""Texts in tables: the rows of JSON, JSON Lines, CSV and Parquet files, one document per row."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from alibi_attn.strict_json import NO_CHARACTER, lone_surrogate

Rows = Iterator[Mapping[str, object]]

_ENCODING = "utf-8-sig"  # spreadsheets write a byte order mark


class CorpusError(ValueError):
    """A text that is missing, empty, not text, or too short; or tokens that are damaged or do not fit."""


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
    except (
        ValueError,
        RecursionError,
        csv.Error,
    ) as error:  # also numbers of 4,301 digits, and lists too deep for json
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
