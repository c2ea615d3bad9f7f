"""Tokens on disk: a text is tokenized once, verified when it is opened, and mapped, never loaded.

STORE/IDENTITY/ holds `manifest.json`, `tokenizer.json` and, for train, valid and perhaps test, `PART.bin` (the tokens, uint8,
uint16 or int32) and `PART.starts.bin` (where documents begin, int64). The identity is a hash of what was asked and of every
source file's content: a changed text is another folder. A folder is written beside its place and renamed, so it is whole or
it is not there; one writer at a time holds the lock, and whoever waited opens what was made. A tokenization that was cut
short begins again: what it left is removed. Read next: `corpus.py`.
"""

import contextlib
import errno
import fcntl
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.lab import sealed_folder
from alibi_attn.lab.config import DataConfig
from alibi_attn.lab.data import sources, tokens
from alibi_attn.lab.data.sources import CorpusError, Part, TextFile
from alibi_attn.lab.data.tokenizing import Tokenizer, load_tokenizer, save_tokenizer, token_dtype
from alibi_attn.lab.sealed_folder import DamagedError, SchemaError, file_sha256
from alibi_attn.records import Json

SCHEMA = 2
HASHED_BYTES = 64 << 20  # files up to this are hashed at every opening; larger ones where their time of change differs

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MANIFEST, _TOKENIZER, _LOCK = "manifest.json", "tokenizer.json", ".lock"


@dataclass(frozen=True)
class TokenFolder:
    """A tokenized text, opened: tokens and starts of documents by part, mapped from disk."""

    path: Path
    tokens: Mapping[Part, Tensor]
    starts: Mapping[Part, Tensor]
    tokenizer: Tokenizer
    facts: Mapping[str, Json]


def tokenized(config: DataConfig, store: Path) -> TokenFolder:
    """The tokens of a text, made if they are not in the store.

    Files are known by size, time of change and inode, or by their hash where those differ. A corpus of the hub is known by
    its name: once tokenized it needs neither the network nor the hub.

    Raises:
        CorpusError: the text cannot be read, the disk is full, or what is stored is damaged.
    """
    asked: dict[str, Json] = {
        "corpus": config.corpus,
        "tokenizer": config.tokenizer,
        "valid_share": config.valid_share,
        "test_share": config.test_share,
    }
    files = sources.text_files(config)
    if files is not None and (known := _unchanged(store, asked, files)) is not None:
        return open_tokens(known)
    found = [] if files is None else [_source(file) for file in files]
    contents: Json = [[source["name"], source["bytes"], source["sha256"]] for source in found]
    folder = store / records.identity("tokens", config.corpus, {**asked, "sources": contents})
    if folder.exists():
        opened = open_tokens(folder)
        _remember(folder, found)
        return opened
    text = sources.hub_text(config) if files is None else sources.split_files(files, config)
    try:
        with _locked(store):
            if not folder.exists():
                _write(folder, text, asked, files or (), found)
    except OSError as error:
        if error.errno not in _FULL:
            raise CorpusError(
                f"{config.corpus} cannot be tokenized into {store} ({error}); pass a folder that you may write to"
            ) from None
        raise CorpusError(
            f"no room on the disk while {config.corpus} was tokenized into {store}: it needs up to "
            f"{2 * text.num_bytes / 1e6:.1f} MB; make room or choose another folder, and run again"
        ) from None
    return open_tokens(folder)


def open_tokens(folder: Path) -> TokenFolder:
    """Map what is stored, after checking every size, and every hash up to `HASHED_BYTES`.

    Raises:
        CorpusError: it is not what was written.
    """
    try:
        manifest = _manifest(folder)
        for name, written in manifest["files"].items():
            sealed_folder.verify(folder, name, written, hashed_bytes=HASHED_BYTES)
        tokenizer = load_tokenizer(folder / _TOKENIZER)
        dtype = token_dtype(tokenizer.vocab_size)
        return TokenFolder(
            folder,
            {part: _map(folder / f"{part}.bin", dtype) for part in manifest["parts"]},
            {part: _map(folder / f"{part}.starts.bin", torch.int64) for part in manifest["parts"]},
            tokenizer,
            dict(manifest["facts"]),
        )
    except SchemaError as error:
        raise CorpusError(f"{error}; delete the folder and run again: the text is tokenized again") from None
    except OSError as error:
        raise _damaged(folder, f"{error.filename} cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise _damaged(folder, str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CorpusError):
            raise
        raise _damaged(folder, f"{_MANIFEST} lacks what a manifest has") from None


def _write(
    folder: Path, text: sources.Text, asked: Json, files: Sequence[TextFile], found: Sequence[Mapping[str, Json]]
) -> None:
    for left in folder.parent.glob(f".*{sealed_folder.PARTIAL}"):  # left by a process that was killed
        shutil.rmtree(left)
    partial = sealed_folder.partial_name(folder)
    try:
        partial.mkdir()
        tokenizer = tokens.tokenizer_of(text)
        save_tokenizer(tokenizer, partial / _TOKENIZER)
        digests = tokens.text_digests(text)
        counts = {}
        for part, documents in text.parts.items():
            with (partial / f"{part}.bin").open("wb") as content, (partial / f"{part}.starts.bin").open("wb") as starts:
                counts[part] = tokens.tokenize(documents, tokenizer, content, starts, digests[part])
        for file, source in zip(files, found, strict=True):
            if _known(source) != _now(file):
                raise CorpusError(f"{file.path} changed while it was read; run again when nobody writes it")
        facts = tokens.corpus_facts(text, tokenizer, counts, digests)
        about = {"schema": SCHEMA, "asked": asked, "sources": found, "parts": list(counts), "facts": facts}
        sealed_folder.publish(partial, folder, _MANIFEST, about)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unchanged(store: Path, asked: Mapping[str, Json], files: Sequence[TextFile]) -> Path | None:
    """The folder whose manifest names just these files as they are now."""
    now = None
    for path in sorted(store.glob(f"*/{_MANIFEST}")):
        try:
            manifest = _manifest(path.parent)
            known = [_known(source) for source in manifest["sources"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # opening it by its identity reports the damage
        if manifest.get("asked") == asked and len(known) == len(files):
            now = now or [_now(file) for file in files]
            if known == now:
                return path.parent
    return None


def _remember(folder: Path, found: Sequence[Mapping[str, Json]]) -> None:
    """The same text with other times of change: note these, so that it need not be hashed again."""
    with contextlib.suppress(OSError):  # a store that may only be read serves as well
        about = {**_manifest(folder), "schema": SCHEMA, "sources": found}
        about.pop("sha256", None)
        records.replace_file(folder / _MANIFEST, sealed_folder.sealed(about, indent=1))


def _source(file: TextFile) -> dict[str, Json]:
    try:
        return {**_now(file), "sha256": file_sha256(file.path)}
    except OSError as error:
        raise CorpusError(f"{file.path} cannot be read ({error.strerror}); pass a file that you may read") from None


def _now(file: TextFile) -> dict[str, Json]:
    found = file.path.stat()
    return {"name": file.name, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def _known(source: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in source.items() if key != "sha256"}


def _manifest(folder: Path) -> dict[str, Any]:
    return sealed_folder.read_manifest(folder, _MANIFEST, schema=SCHEMA)


def _damaged(folder: Path, what: str) -> CorpusError:
    return CorpusError(
        f"the tokens in {folder} are damaged ({what}); delete the folder and run again: the text is tokenized again"
    )


def _map(path: Path, dtype: torch.dtype) -> Tensor:
    """A file as a tensor that is read from disk where it is looked at; writing to it changes no file."""
    size = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with its process, however that ends."""
    store.mkdir(parents=True, exist_ok=True)
    with (store / _LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
