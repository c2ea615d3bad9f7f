"""Record: one result, as JSON: what ran, on what, what came out.

Everything that is measured here (a training, an evaluation, a benchmark, a certificate attacked) ends as a record, and
every figure and table is a pure function of records. Records are small, readable and never overwritten.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from alibi_attn import processor
from alibi_attn.strict_json import JsonError, parse

SCHEMA = 1
LARGEST = 1e100  # nothing is measured beyond; sums, squares and axes of such numbers still fit a float
MOST = 2**53  # nothing is counted beyond, and a float holds every count
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# The range of the columns that figures draw and compute with, by name.
_DRAWN = (
    (re.compile(r"accuracy|share"), 0, 1),
    (re.compile(r"(paper_)?length"), 1, MOST),
    (re.compile(r"position|distance|step|head|(.*_)?tokens?|parameters|peak_memory_bytes"), 0, MOST),
    (
        re.compile(r"(.*_)?(perplexity|ms|per_second)|seconds|hours|(loss_|nonoverlapping_|sliding_|windowed_)?nats"),
        0,
        LARGEST,
    ),
)
_PACKAGES = ("alibi-attn", "numpy", "torch", "triton", "jax", "flax", "transformers", "accelerate")


class RecordError(ValueError):
    """A record that cannot be read, or that this version does not understand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One result.

    Args:
        kind: what sort of result: "training", "evaluation", "benchmark", "certificate", ...
        name: a readable identity in path style, "quick/alibi/seed-0"; together with `config` it says what was asked.
        config: everything that was asked for, as JSON; equal kind, name and config mean the same question.
        metrics: single numbers that came out; the unit is in the name ("loss_nats", "peak_memory_bytes").
        curves: columns of equal length that came out, by name ("length", "loss_nats").
        machine, versions, commit, command, started, seconds: where, with what, when and for how long.
    """

    kind: str
    name: str
    config: Mapping[str, Json]
    metrics: Mapping[str, float | None]
    curves: Mapping[str, Mapping[str, Sequence[Json]]] = dataclasses.field(default_factory=dict)
    machine: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Raises RecordError where a field is not what figures and tables may trust."""
        for field in ("kind", "name", "command", "started"):
            if not isinstance(getattr(self, field), str):
                raise RecordError(f"{field} is {getattr(self, field)!r} but must be text")
        for field in ("config", "metrics", "curves", "machine", "versions"):
            if not isinstance(getattr(self, field), Mapping):
                raise RecordError(f"{field} is {getattr(self, field)!r} but must map names to values")
        for name, value in self.metrics.items():
            if value is not None and not isinstance(value, int | float):
                raise RecordError(f"metrics has {name} = {value!r} but a metric is a number or None")
        for name, columns in self.curves.items():
            if not isinstance(columns, Mapping) or not all(
                isinstance(column, list | tuple) for column in columns.values()
            ):
                raise RecordError(f"curves has {name} = {columns!r} but a curve maps names to columns (lists)")
            if len({len(column) for column in columns.values()}) > 1:
                found = ", ".join(f"{column} {len(values)}" for column, values in columns.items())
                raise RecordError(f"the columns of the curve {name} must have one length but have: {found}")
        if not isinstance(self.seconds, int | float) or abs(self.seconds) > MOST:
            raise RecordError(f"seconds is {self.seconds!r} but must be a number of seconds")
        if self.commit is not None and not isinstance(self.commit, str):
            raise RecordError(f"commit is {self.commit!r} but must be text or None")


def machine() -> dict[str, Json]:
    """The machine in words and numbers; names no host and no user."""
    gpu: str | None = None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "processor": processor.name(),
        "instructions": processor.instructions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    return dict(_versions())


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def commit() -> str | None:
    """The commit of the source tree this package runs from, with "+" when files differ; None outside a checkout.

    It is looked up once a process, whose code is what it loaded whatever happens to the files.
    """
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        name = _git(here, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """The command that is running, as one would type it (the program's name without its folder)."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "python -m alibi_attn"
    return shlex.join([*program.split(), *sys.argv[1:]]) if sys.argv[0] else ""


def make(
    kind: str,
    name: str,
    *,
    config: Mapping[str, Json],
    metrics: Mapping[str, float | None],
    curves: Mapping[str, Mapping[str, Sequence[Json]]] | None = None,
    started: datetime.datetime | None = None,
) -> Record:
    """A record of something that just ended on this machine; `started` (aware) dates it and gives its seconds."""
    now = datetime.datetime.now(datetime.UTC)
    started = started or now
    return Record(
        kind=kind,
        name=name,
        config=config,
        metrics=metrics,
        curves=curves or {},
        machine=machine(),
        versions=versions(),
        commit=commit(),
        command=command(),
        started=started.isoformat(timespec="seconds"),
        seconds=(now - started).total_seconds(),
    )


def identity(kind: str, name: str, config: Mapping[str, Json]) -> str:
    """Twelve hexadecimal digits that are equal exactly when kind, name and config are equal as JSON."""
    return hashlib.sha256(_dumps([kind, name, config]).encode()).hexdigest()[:12]


def recorded(folder: Path, kind: str, name: str, config: Mapping[str, Json]) -> Path | None:
    """The file in the folder whose record has this identity; None if there is none."""
    return next(folder.glob(f"*-{identity(kind, name, config)}.json"), None)


def expect_new(folder: Path, kind: str, name: str, config: Mapping[str, Json]) -> None:
    """Before something long is measured: that its record can be kept.

    Raises:
        FileExistsError: the folder has a record of this identity, which `save` would not overwrite.
    """
    path = recorded(folder, kind, name, config)
    if path is not None:
        raise _answered(path)


def save(record: Record, folder: Path) -> Path:
    """Write the record as `<kind>-<name>-<identity>.json`, whole or not at all.

    Raises:
        FileExistsError: the same question was answered already; records are never overwritten.
    """
    path = _path(record, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _beside(path, _text(record)) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise _answered(path) from None
    return path


def grow(record: Record, folder: Path) -> Path:
    """`save`, or put the record in the place of what the same measurement wrote a while ago, so that ending early loses nothing.

    Raises:
        FileExistsError: the file is that of another measurement, started at another time.
    """
    path = _path(record, folder)
    if not path.exists():
        return save(record, folder)
    if load(path).started != record.started:
        raise _answered(path)
    return replace_file(path, _text(record))


def replace_file(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all, in the place of what was there; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path, content) as temporary:
        os.replace(temporary, path)
    return path


def load(path: Path) -> Record:
    """Read one record.

    Raises:
        RecordError: not JSON, not a record, written by another schema, or with numbers that nobody can have measured.
    """
    try:
        data = parse(path.read_bytes())
    except JsonError as error:
        raise RecordError(f"{path} is not JSON ({error}); a record is written by alibi run or alibi bench") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{path} is JSON but not a record: it has no schema")
    if data["schema"] != SCHEMA:
        raise RecordError(
            f"{path} has schema {data['schema']} but this version reads {SCHEMA}; read it with the version that wrote it"
        )
    expected = {field.name for field in dataclasses.fields(Record)}
    if missing := expected - data.keys():
        raise RecordError(f"{path} lacks {', '.join(sorted(missing))}")
    try:
        record = Record(**{key: data[key] for key in expected})
        _check_numbers(record)
    except RecordError as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    return record


def find(*paths: Path, kind: str | None = None) -> Iterator[Record]:
    """The records in files and folders (searched whole), in order of path; only one kind if it is given.

    Raises:
        FileNotFoundError: a path that does not exist.
        RecordError: a `.json` file that is no record.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; pass record files (.json) or folders that hold them")
        for file in sorted(file for file in path.rglob("*.json") if not file.is_dir()) if path.is_dir() else [path]:
            record = load(file)
            if kind is None or record.kind == kind:
                yield record


def finite(value: object) -> object:
    """As JSON can hold it: NaN, infinity and what is beyond LARGEST as null, tuples as lists."""
    if isinstance(value, float):
        return value if abs(value) <= LARGEST else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@contextlib.contextmanager
def _beside(path: Path, content: bytes) -> Iterator[str]:
    """A temporary file with the content, on the disk and in the folder of `path`; gone afterwards unless renamed."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _path(record: Record, folder: Path) -> Path:
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{record.kind}-{record.name}").strip("-")
    return folder / f"{stem}-{identity(record.kind, record.name, record.config)}.json"


def _text(record: Record) -> bytes:
    text = json.dumps(finite(dataclasses.asdict(record)), indent=1, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()


def _answered(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists; records are never overwritten: delete it, or write to another folder")


def _check_numbers(record: Record) -> None:
    """Raises RecordError for a column that holds more than single values, or a number outside the range of its name."""
    single = [("metrics", name, [value]) for name, value in record.metrics.items()]
    columns = [
        (f"curves.{curve}", name, column) for curve, found in record.curves.items() for name, column in found.items()
    ]
    for place, name, column in [*single, *columns]:
        bounds = next(((least, most) for names, least, most in _DRAWN if names.fullmatch(name)), None)
        for value in column:
            if value is not None and not isinstance(value, int | float | str):
                raise RecordError(f"{place}.{name} has {value!r} but a column holds numbers, texts and null")
            if bounds and value is not None and (isinstance(value, str) or not _within(value, *bounds)):
                raise RecordError(
                    f"{place}.{name} has {value!r} but must be null or a number from {bounds[0]} to {bounds[1]:g}"
                )
            if isinstance(value, int | float) and abs(value) > LARGEST:
                raise RecordError(f"{place}.{name} has {value!r}, more than can be measured")


def _within(value: float, least: float, most: float) -> bool:
    """Within the bounds up to the rounding of sums: a share of 1.0000001 and a loss of −1e-7 are allowed."""
    return least - 1e-3 <= value <= most * (1 + 1e-3)


def _dumps(value: object) -> str:
    return json.dumps(finite(value), sort_keys=True, allow_nan=False, separators=(",", ":"))


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
