"""Folders whose files are all verified when they are read.

A folder is written with `alibi_attn.files.new_folder`. Its manifest comes last: it has the size and hash of every other file,
and its own hash. Checkpoints (`training/checkpoint.py`) and tokenized texts (`data/corpus.py`) use this format.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alibi_attn.strict_json import JsonError, is_sealed, parse, sealed


class DamagedError(ValueError):
    """A file that is missing or differs from what was written; the rest of a sentence that begins with its name."""


class SchemaError(ValueError):
    """A sealed file that has no schema, or a schema that this version does not support."""


def seal(folder: Path, manifest: str, about: Mapping[str, Any]) -> None:
    """Write the manifest of a folder that is complete otherwise."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    (folder / manifest).write_bytes(sealed({**about, "files": files}, indent=1))


def read_sealed(folder: Path, name: str, *, schema: int) -> dict[str, Any]:
    """A sealed file of JSON, such as a manifest: the `about` of `seal`, with "files".

    Also supports the previous schema, which has no hash of itself.

    Raises:
        DamagedError: the file is missing, not JSON, or changed.
        SchemaError: another version or another program wrote it.
    """
    try:
        data = parse((folder / name).read_bytes())
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from None
    except JsonError as error:
        raise DamagedError(f"is not JSON: {error}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise SchemaError(f"{folder / name} has no schema")
    if data["schema"] not in (schema - 1, schema):
        raise SchemaError(f"{folder / name} has schema {data['schema']}, but this version reads schema {schema}")
    if data["schema"] == schema and not is_sealed(data):
        raise DamagedError("is not what was written")
    return data


def verify(folder: Path, name: str, written: Mapping[str, Any], *, hashed_bytes: int | None = None) -> None:
    """Check the size and the hash of one file against its entry in the manifest.

    Args:
        hashed_bytes: a larger file is hashed only if its modification time differs; None hashes every file.

    Raises:
        DamagedError: the file is missing or differs.
    """
    try:
        found = (folder / name).stat()
        if found.st_size != written.get("bytes", found.st_size):
            raise DamagedError(f"has {found.st_size} bytes instead of {written['bytes']}")
        large = hashed_bytes is not None and found.st_size > hashed_bytes
        unchanged = large and found.st_mtime_ns == written["mtime_ns"]
        if not unchanged and file_sha256(folder / name) != written["sha256"]:
            raise DamagedError("is not what was written")
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": file_sha256(path)}
