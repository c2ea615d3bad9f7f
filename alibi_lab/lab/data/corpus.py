"""Loads a corpus as tokens: a text is read once in chunks, and each chunk is encoded, written, counted and hashed.

Without a store the tokens are in memory. In a store they are on disk, verified whenever they are opened, and memory-mapped:
STORE/IDENTITY/ holds `manifest.json`, `tokenizer.json` and, for train, valid and optionally test, `PART.bin` (the tokens, uint8,
uint16 or int32) and `PART.starts.bin` (the starts of documents, int64). The identity is a hash of the config and of every
source file's content, so a changed text gets another folder. A folder is written under a temporary name and renamed, so it is
complete or absent. One process writes at a time; processes that waited open its result. An interrupted tokenization starts
again and removes the files it left. Next: `training/train.py`.
"""

import collections
import contextlib
import errno
import functools
import hashlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from alibi_attn.files import new_folder, remove_leftovers, replace_file
from alibi_attn.strict_json import sealed
from alibi_lab import records
from alibi_lab.lab import sealed_folder
from alibi_lab.lab.config import DataConfig, Split, Task
from alibi_lab.lab.data import sources, tasks
from alibi_lab.lab.data.sources import CorpusError as CorpusError
from alibi_lab.lab.data.sources import Documents, Part, Text, TextFile, is_table
from alibi_lab.lab.data.tokenizing import Tokenizer, byte_tokenizer, load_tokenizer, make_tokenizer, token_dtype
from alibi_lab.lab.sealed_folder import DamagedError, SchemaError, file_sha256
from alibi_lab.records import Json

# Of one part of a corpus: "documents", "tokens", "bytes", "words" (separated by white space) and "lines".
Counts: TypeAlias = Mapping[str, int]
# Opens a file of this name for writing.
Opened: TypeAlias = Callable[[str], contextlib.AbstractContextManager[BinaryIO]]
Sources: TypeAlias = Sequence[Mapping[str, Json]]  # the state and the hash of each file

SCHEMA = 2
HASHED_BYTES = 64 << 20  # smaller files are hashed whenever they are opened, larger ones only if their mtime differs

_SETTINGS = ("corpus", "tokenizer", "valid_share", "test_share")
_MANIFEST, _LOCK, _TOKENIZER = "manifest.json", ".lock", "tokenizer.json"
_manifest = functools.partial(sealed_folder.read_sealed, name=_MANIFEST, schema=SCHEMA)
_AGAIN = "delete the folder and run again: the text is tokenized again"
_GROUP_BYTES, _GROUP_CHUNKS = 1 << 20, 512  # encoded at once


@dataclass(frozen=True)
class Corpus:
    """Tokens to train and test on, one-dimensional uint8, uint16 or int32, and the facts that records repeat.

    Args:
        train, valid, test: the tokens; test is None unless data.test_share or the corpus itself provides one.
        facts: its size, its split, and the hash of all its text. Training and validation text share one hash, the test text
            has its own.
        tokenizer: decodes the tokens; its `dump` is stored with them.
        starts: for "train", "valid" and "test", the start of each document, int64, rising from 0.
    """

    train: Tensor
    valid: Tensor
    facts: Mapping[str, Json]
    test: Tensor | None = None
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
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


def load_corpus(config: DataConfig, store: Path | None = None) -> Corpus:
    """The corpus that the config names.

    Args:
        store: a folder for tokenized texts. Each text is tokenized once, in constant memory, and mapped from disk; several
            processes may share the folder. None tokenizes in memory, every time.

    Raises:
        CorpusError: the text cannot be read or stored.
        TaskError: the documents of a task's corpus are too short for the task.
    """
    if task := tasks.parse_corpus(config.corpus):
        return _task_corpus(config.corpus, *task)
    if store is not None:
        return _stored(config, store)
    text = sources.split_text(config, sources.text_files(config))
    files = collections.defaultdict[str, io.BytesIO](io.BytesIO)
    tokenizer, facts = _tokenize_text(config, text, lambda name: contextlib.nullcontext(files[name]))
    return _corpus_of(text.parts, facts, tokenizer, lambda name, dtype: _tensor(files[name], dtype))


def whole_text(paths: Sequence[Path], tokenizer: Tokenizer | None = None, text_field: str = "") -> Corpus:
    """The text of files and folders as a corpus to test on (`valid`), not split, with its facts; as bytes by default.

    Raises:
        CorpusError: as for `load_corpus`.
    """
    tokenizer = tokenizer or byte_tokenizer()
    documents = sources.documents_of(sources.local_files(paths, text_field))
    content, starts, digest = io.BytesIO(), io.BytesIO(), hashlib.sha256()
    counts = _tokenize(documents, tokenizer, content, starts, digest)
    facts: dict[str, Json] = {"name": "text", "sha256": digest.hexdigest(), **_text_facts(tokenizer, counts)}
    ids = _tensor(content, token_dtype(tokenizer.vocab_size))
    return Corpus(ids[:0], ids, facts, tokenizer=tokenizer, starts={"valid": _tensor(starts, torch.int64)})


def random_corpus(vocab_size: int, tokens: int) -> Corpus:
    """A text of random tokens, equal for equal arguments: to measure speed, which does not depend on the text."""
    drawn = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return Corpus(train=drawn, valid=drawn, facts={"name": "random"}, starts={"train": torch.tensor([0])})


def _task_corpus(name: str, task: Task, document_tokens: int) -> Corpus:
    """Made from seeds within a second or two, so it is never stored; every byte is a token, text or not."""
    sizes = enumerate(tasks.CORPUS_TOKENS.items())
    parts = {part: tasks.task_tokens(task, n, seed, document_tokens=document_tokens) for seed, (part, n) in sizes}
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts.values())).hexdigest()
    facts: dict[str, Json] = {"name": name, "sha256": digest, "split": "made of different seeds"}
    facts |= {"tokenizer": "bytes", "vocab_size": 256, "bytes_per_token": 1}
    facts |= {f"{part}_tokens": len(ids) for part, ids in parts.items()}
    starts = {part: torch.arange(0, len(ids), document_tokens) for part, ids in parts.items()}
    return Corpus(parts["train"], parts["valid"], facts, parts["test"], starts=starts)


def _stored(config: DataConfig, store: Path) -> Corpus:
    """The tokens of a text, made if they are not in the store.

    Files are recognized by size, modification time and inode, or by their hash if those differ. A hub corpus is recognized by
    its name: once tokenized, it needs neither the network nor the hub.

    Raises:
        CorpusError: the text cannot be read, the disk is full, or the stored tokens are damaged.
    """
    settings: dict[str, Json] = {name: getattr(config, name) for name in _SETTINGS}
    files = sources.text_files(config)
    if any(is_table(file.path) for file in files):
        settings["text_field"] = config.text_field or "text"
    if known := _unchanged(store, settings, files):
        return _opened(known)
    origins = [_source(file) for file in files]
    contents: Json = [[source["name"], source["bytes"], source["sha256"]] for source in origins]
    folder = store / records.identity("tokens", config.corpus, {**settings, "sources": contents})
    if folder.exists():
        corpus = _opened(folder)
        _remember(folder, origins)
        return corpus
    text = sources.split_text(config, files)
    try:
        store.mkdir(parents=True, exist_ok=True)
        with FileLock(store / _LOCK):
            if not folder.exists():
                _write(folder, config, text, settings, files, origins)
    except OSError as error:
        message = f"{config.corpus} cannot be tokenized into {store} ({error}); pass a folder that you may write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # the disk is full
            needed = f"{2 * sum(text.sizes.values()) / 1e6:.1f} MB; make room or choose another folder, and run again"
            message = f"no room on the disk while {config.corpus} was tokenized into {store}: it needs up to {needed}"
        raise CorpusError(message) from None
    return _opened(folder)


def _opened(folder: Path) -> Corpus:
    """Maps stored tokens after checking every size, and every hash up to `HASHED_BYTES`.

    Raises:
        CorpusError: the files differ from what was written.
    """
    name = _MANIFEST
    try:
        manifest = _manifest(folder)
        for name, written in manifest["files"].items():
            sealed_folder.verify(folder, name, written, hashed_bytes=HASHED_BYTES)
        facts, tokenizer = dict(manifest["facts"]), load_tokenizer(folder / _TOKENIZER)
        return _corpus_of(manifest["parts"], facts, tokenizer, functools.partial(_map, folder))
    except SchemaError as error:
        raise CorpusError(f"{error}; {_AGAIN}") from None
    except CorpusError:
        raise
    except OSError as error:
        reason = f"{error.filename} cannot be read: {error.strerror}"
    except DamagedError as error:
        reason = f"{name} {error}"
    except (KeyError, TypeError, ValueError, AttributeError):
        reason = f"{_MANIFEST} has missing entries"
    raise CorpusError(f"the tokens in {folder} are damaged ({reason}); {_AGAIN}")


def _write(
    folder: Path, config: DataConfig, text: Text, settings: Json, files: Sequence[TextFile], origins: Sources
) -> None:
    remove_leftovers(folder.parent)
    with new_folder(folder) as partial:
        _, facts = _tokenize_text(config, text, lambda name: (partial / name).open("wb"))
        for file, source in zip(files, origins, strict=True):
            if {**source, **_current(file)} != source:
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
            same = ({**one, **now} == one for one, now in zip(manifest["sources"], current, strict=True))
            if manifest.get("asked") == settings and all(same):
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


def _tokenize_text(config: DataConfig, text: Text, opened: Opened) -> tuple[Tokenizer, dict[str, Json]]:
    """Writes tokenizer.json, and PART.bin and PART.starts.bin for each part, which `_corpus_of` reads.

    Returns:
        the tokenizer, made from the training text, and the facts of the corpus.

    Raises:
        CorpusError: the text has no tokens, or the tokenizer cannot be made.
    """
    train, train_bytes = text.parts["train"], text.sizes["train"]
    tokenizer = make_tokenizer(config.tokenizer, lambda: (chunk for chunk, _ in train()), train_bytes)
    with opened(_TOKENIZER) as file:
        file.write(tokenizer.dump())
    shared = hashlib.sha256(train_bytes.to_bytes(8, "big"))
    digests, counts = {"train": shared, "valid": shared, "test": hashlib.sha256()}, dict[Part, Counts]()
    for part, documents in text.parts.items():
        with opened(f"{part}.bin") as content, opened(f"{part}.starts.bin") as starts:
            counts[part] = _tokenize(documents, tokenizer, content, starts, digests[part])
    facts: dict[str, Json] = {"name": config.corpus, "sha256": shared.hexdigest(), "split": text.split}
    if "test" in counts:
        facts["test_sha256"] = digests["test"].hexdigest()
    for part, count in counts.items():
        facts |= {f"{part}_{'parts' if name == 'documents' else name}": number for name, number in count.items()}
    return tokenizer, facts | _text_facts(tokenizer, counts["valid"])


def _tokenize(
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


def _groups(documents: Documents, document_end: bytes) -> Iterator[list[tuple[bytes, bytes, bool]]]:
    """Chunks to encode together: (chunk, the bytes to append to it, whether it is the first of a document)."""
    group: list[tuple[bytes, bytes, bool]] = []
    size = 0
    for (chunk, first), (_, last) in itertools.pairwise(itertools.chain(documents(), [(b"", True)])):
        missing = document_end if last and not chunk.endswith(document_end) else b""
        group.append((chunk, missing, first))
        size += len(chunk)
        if size >= _GROUP_BYTES or len(group) >= _GROUP_CHUNKS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _text_facts(tokenizer: Tokenizer, valid: Counts) -> dict[str, Json]:
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


def _corpus_of(
    parts: Iterable[Part], facts: Mapping[str, Json], tokenizer: Tokenizer, read: Callable[[str, torch.dtype], Tensor]
) -> Corpus:
    """The corpus whose parts `_tokenize_text` wrote; `read` returns the content of a file."""
    ids = {part: read(f"{part}.bin", token_dtype(tokenizer.vocab_size)) for part in parts}
    starts = {part: read(f"{part}.starts.bin", torch.int64) for part in parts}
    return Corpus(**ids, facts=facts, tokenizer=tokenizer, starts=starts)


def _tensor(file: io.BytesIO, dtype: torch.dtype) -> Tensor:
    content = file.getbuffer()
    return torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(0, dtype=dtype)


def _map(folder: Path, name: str, dtype: torch.dtype) -> Tensor:
    """A file as a tensor whose pages are read on access; writing to the tensor does not change the file."""
    path = folder / name
    size = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
