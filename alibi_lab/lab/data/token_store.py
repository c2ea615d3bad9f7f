"""Tokens on disk: a text is tokenized once, verified whenever it is opened, and memory-mapped.

STORE/IDENTITY/ holds `manifest.json`, `tokenizer.json` and, for train, valid and optionally test, `PART.bin` (the tokens, uint8,
uint16 or int32) and `PART.starts.bin` (the starts of documents, int64). The identity is a hash of the config and of every
source file's content, so a changed text gets another folder. A folder is written under a temporary name and renamed, so it is
complete or absent. One process writes at a time; processes that waited open its result. An interrupted tokenization starts
again and removes the files it left. Next: `corpus.py`.
"""

import contextlib
import errno
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from filelock import FileLock
from torch import Tensor

from alibi_attn.files import new_folder, remove_leftovers, replace_file
from alibi_attn.strict_json import sealed
from alibi_lab import records
from alibi_lab.lab import sealed_folder
from alibi_lab.lab.config import DataConfig
from alibi_lab.lab.data import sources, tokens
from alibi_lab.lab.data.row_files import CorpusError, is_table
from alibi_lab.lab.data.sources import TextFile
from alibi_lab.lab.data.tokenizing import load_tokenizer
from alibi_lab.lab.data.tokens import Corpus
from alibi_lab.lab.sealed_folder import DamagedError, SchemaError, file_sha256
from alibi_lab.records import Json

Sources: TypeAlias = Sequence[Mapping[str, Json]]  # the state and the hash of each file

SCHEMA = 2
HASHED_BYTES = 64 << 20  # smaller files are hashed whenever they are opened, larger ones only if their mtime differs

_SETTINGS = ("corpus", "tokenizer", "valid_share", "test_share")
_MANIFEST, _LOCK = "manifest.json", ".lock"
_manifest = functools.partial(sealed_folder.read_manifest, name=_MANIFEST, schema=SCHEMA)
_AGAIN = "delete the folder and run again: the text is tokenized again"


def tokenized(config: DataConfig, store: Path) -> Corpus:
    """The tokens of a text, made if they are not in the store.

    Files are recognized by size, modification time and inode, or by their hash if those differ. A hub corpus is recognized by
    its name: once tokenized, it needs neither the network nor the hub.

    Raises:
        CorpusError: the text cannot be read, the disk is full, or the stored tokens are damaged.
    """
    settings: dict[str, Json] = {name: getattr(config, name) for name in _SETTINGS}
    files = sources.text_files(config.corpus, config.text, config.text_field)
    if any(is_table(file.path) for file in files or ()):
        settings["text_field"] = config.text_field or "text"
    if files is not None and (known := _unchanged(store, settings, files)) is not None:
        return open_tokens(known)
    origins = [_source(file) for file in files or ()]
    contents: Json = [[source["name"], source["bytes"], source["sha256"]] for source in origins]
    folder = store / records.identity("tokens", config.corpus, {**settings, "sources": contents})
    if folder.exists():
        corpus = open_tokens(folder)
        _remember(folder, origins)
        return corpus
    text = sources.split_text(config, files)
    try:
        store.mkdir(parents=True, exist_ok=True)
        with FileLock(store / _LOCK):
            if not folder.exists():
                _write(folder, text, settings, files or (), origins)
    except OSError as error:
        message = f"{config.corpus} cannot be tokenized into {store} ({error}); pass a folder that you may write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # the disk is full
            needed = f"{2 * text.num_bytes / 1e6:.1f} MB; make room or choose another folder, and run again"
            message = f"no room on the disk while {config.corpus} was tokenized into {store}: it needs up to {needed}"
        raise CorpusError(message) from None
    return open_tokens(folder)


def open_tokens(folder: Path) -> Corpus:
    """Maps stored tokens after checking every size, and every hash up to `HASHED_BYTES`.

    Raises:
        CorpusError: the files differ from what was written.
    """
    try:
        manifest = _manifest(folder)
        for name, written in manifest["files"].items():
            sealed_folder.verify(folder, name, written, hashed_bytes=HASHED_BYTES)
        facts, tokenizer = dict(manifest["facts"]), load_tokenizer(folder / tokens.TOKENIZER)
        return tokens.corpus_of(manifest["parts"], facts, tokenizer, functools.partial(_map, folder))
    except SchemaError as error:
        raise CorpusError(f"{error}; {_AGAIN}") from None
    except CorpusError:
        raise
    except OSError as error:
        reason = f"{error.filename} cannot be read: {error.strerror}"
    except DamagedError as error:
        reason = str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        reason = f"{_MANIFEST} has missing entries"
    raise CorpusError(f"the tokens in {folder} are damaged ({reason}); {_AGAIN}")


def _write(folder: Path, text: sources.Text, settings: Json, files: Sequence[TextFile], origins: Sources) -> None:
    remove_leftovers(folder.parent)
    with new_folder(folder) as partial:
        _, facts = tokens.tokenize_text(text, lambda name: (partial / name).open("wb"))
        for file, source in zip(files, origins, strict=True):
            if _without_hash(source) != _current(file):
                raise CorpusError(f"{file.path} changed while it was read; run again when no process writes to it")
        about = {"schema": SCHEMA, "asked": settings, "sources": origins, "parts": list(text.parts), "facts": facts}
        sealed_folder.seal(partial, _MANIFEST, about)


def _unchanged(store: Path, settings: Mapping[str, Json], files: Sequence[TextFile]) -> Path | None:
    """The folder whose manifest lists exactly these files in their current state."""
    current = [_current(file) for file in files]
    for path in sorted(store.glob(f"[!.]*/{_MANIFEST}")):  # not those that a killed process left incomplete
        # Damage is reported when the folder is opened by its identity.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            manifest = _manifest(path.parent)
            if manifest.get("asked") == settings and [_without_hash(one) for one in manifest["sources"]] == current:
                return path.parent
    return None


def _remember(folder: Path, origins: Sources) -> None:
    """Stores new modification times of an unchanged text, so that it need not be hashed again."""
    with contextlib.suppress(OSError):  # the store may be read-only
        about = {**_manifest(folder), "schema": SCHEMA, "sources": origins}
        about.pop("sha256", None)
        replace_file(folder / _MANIFEST, sealed(about, indent=1))


def _source(file: TextFile) -> dict[str, Json]:
    try:
        return {**_current(file), "sha256": file_sha256(file.path)}
    except OSError as error:  # has no file name if the disk fails
        raise CorpusError(f"{file.path} cannot be read ({error.strerror}); pass a file that you may read") from None


def _current(file: TextFile) -> dict[str, Json]:
    status = file.path.stat()
    return {"name": file.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _without_hash(source: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in source.items() if key != "sha256"}


def _map(folder: Path, name: str, dtype: torch.dtype) -> Tensor:
    """A file as a tensor whose pages are read on access; writing to the tensor does not change the file."""
    path = folder / name
    size = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
