"""Records: each result as one JSON file, with what was run, where, and the numbers.

Every measurement of this package (a training, an evaluation, a benchmark, an attack on the certificate) is saved as a record,
and every figure and table is a pure function of records. Records are small, readable and never overwritten.
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
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import alibi_attn
from alibi_attn import files, processor
from alibi_attn.strict_json import JsonError, is_sealed, parse, sealed

SCHEMA = 1
SPEEDS = ("benchmark", "speed")  # kinds of records that measure time; their versions have a hash of the kernels
_DOCSTRINGS = re.compile(r'^[ \t]*"""(?:.|\n)*?"""[ \t]*$', re.MULTILINE)
_COMMENTS = re.compile(r"^[ \t]*(?:# |//).*$", re.MULTILINE)  # whole lines, in Python and C++
LARGEST = 1e100  # the largest measured value; sums, squares and axes of such numbers still fit into a float
MAX_COUNT = 2**53  # the largest count; a float holds every integer up to it
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Curve: TypeAlias = Mapping[str, Sequence[Json]]
Curves: TypeAlias = Mapping[str, Curve]

# The allowed range of the columns that figures use, by name.
_DRAWN = (
    (re.compile(r"accuracy|share"), 0, 1),
    (re.compile(r"(paper_)?length"), 1, MAX_COUNT),
    (re.compile(r"position|distance|step|head|(.*_)?tokens?|parameters|peak_memory_bytes"), 0, MAX_COUNT),
    (re.compile(r"(.*_)?(perplexity|ms|per_second)|seconds|hours"), 0, LARGEST),
    (re.compile(r"(loss_|nonoverlapping_|sliding_|windowed_)?nats"), 0, LARGEST),
)
_PACKAGES = ("alibi-attn", "numpy", "torch", "triton", "jax", "flax", "transformers", "accelerate")


class RecordError(ValueError):
    """A record cannot be read, or has another schema."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Record:
    """One result.

    Args:
        kind: the type of result: "training", "evaluation", "benchmark", "certificate", ...
        name: a readable name in path style, "quick/alibi/seed-0".
        config: all settings, as JSON. Records with equal kind, name and config are of the same measurement.
        metrics: single numbers; the unit is in the name ("loss_nats", "peak_memory_bytes").
        curves: columns of equal length, by curve and column ("length", "loss_nats").
        machine, versions, commit, command, started, seconds: where, with what, when and for how long it ran. A record of speed
            also has a hash of the kernels among its versions.
    """

    kind: str
    name: str
    config: Mapping[str, Json]
    metrics: Mapping[str, float | None]
    curves: Curves = dataclasses.field(default_factory=dict)
    machine: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    schema: int = SCHEMA

    def __repr__(self) -> str:
        names = f"metrics={list(self.metrics)}, curves={list(self.curves)}"
        return f"Record({self.kind} {self.name}, {names}, {self.started})"

    def __post_init__(self) -> None:
        """Raises RecordError if a field has the wrong type, so that figures and tables need no checks."""
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
            if not (isinstance(columns, Mapping) and all(isinstance(one, list | tuple) for one in columns.values())):
                raise RecordError(f"curves has {name} = {columns!r} but a curve maps names to columns (lists)")
            if len({len(column) for column in columns.values()}) > 1:
                lengths = ", ".join(f"{column} {len(values)}" for column, values in columns.items())
                raise RecordError(f"the columns of the curve {name} must have equal lengths but have: {lengths}")
        if not isinstance(self.seconds, int | float) or abs(self.seconds) > MAX_COUNT:
            raise RecordError(f"seconds is {self.seconds!r} but must be a number of seconds")
        if self.commit is not None and not isinstance(self.commit, str):
            raise RecordError(f"commit is {self.commit!r} but must be text or None")


def machine() -> dict[str, Json]:
    """A description of this machine, without host name or user name."""
    torch = sys.modules.get("torch")
    return {
        "processor": processor.name(),
        "instructions": processor.instructions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@functools.cache
def versions() -> Mapping[str, str]:
    """Installed versions of the packages that results depend on."""
    installed = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


@functools.cache
def commit() -> str | None:
    """The commit of the source tree this package runs from, with "+" if files differ from it; None outside a checkout.

    It is determined once per process, because the loaded code does not change when the files do.
    """
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, cwd=here, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def kernels() -> str:
    """A hash of the sources that decide how fast attention is, without comments, docstrings and white space."""
    folder, digest = Path(alibi_attn.__file__).parent / "attention", hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".hpp")):
        text = f"{path.relative_to(folder).as_posix()}\n{path.read_text(encoding='utf-8')}"
        digest.update(" ".join(_COMMENTS.sub("", _DOCSTRINGS.sub("", text)).split()).encode())
    return digest.hexdigest()[:12]


def age(record: Record) -> str:
    """Why a record of speed does not describe the present kernels; "" if it does, or if it is not about speed."""
    if record.kind not in SPEEDS or record.versions.get("kernels") == kernels():
        return ""
    if "kernels" in record.versions:
        return "measured with other kernels than the present ones"
    return "measured by an older version, which kept no hash of the kernels"


def command() -> str:
    """The running command line, with the program's name without its folder."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "python -m alibi_lab"
    words = shlex.join([*program.split(), *sys.argv[1:]]) if sys.argv[0] else ""
    return words.encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8


def make(
    kind: str,
    name: str,
    *,
    config: Mapping[str, Json],
    metrics: Mapping[str, float | None],
    curves: Curves | None = None,
    started: datetime.datetime | None = None,
) -> Record:
    """A record of a measurement that just ended on this machine; `started` (a time with a zone) gives its date and duration."""
    now = datetime.datetime.now(datetime.UTC)
    started = started or now
    return Record(
        kind=kind,
        name=name,
        config=config,
        metrics=metrics,
        curves=curves or {},
        machine=machine(),
        versions={**versions(), **({"kernels": kernels()} if kind in SPEEDS else {})},
        commit=commit(),
        command=command(),
        started=started.isoformat(timespec="seconds"),
        seconds=(now - started).total_seconds(),
    )


def identity(kind: str, name: str, config: Mapping[str, Json]) -> str:
    """A hash of twelve hexadecimal digits over kind, name and config as JSON."""
    text = json.dumps(finite([kind, name, config]), sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def recorded(folder: Path, kind: str, name: str, config: Mapping[str, Json]) -> Path | None:
    """The file of the record with this identity in the folder; None if there is none."""
    return with_identity(folder, identity(kind, name, config))


def with_identity(folder: Path, digits: str) -> Path | None:
    """The file of the record with these digits of `identity`; None if there is none."""
    return next(folder.glob(f"*-{digits}.json"), None)


def expect_new(folder: Path, kind: str, name: str, config: Mapping[str, Json]) -> None:
    """Checks before a long measurement that its record can be saved.

    Raises:
        FileExistsError: the folder already has a record of this identity, and records are never overwritten.
    """
    if path := recorded(folder, kind, name, config):
        raise _exists(path)


def save(record: Record, folder: Path) -> Path:
    """Write the record as `<kind>-<name>-<identity>.json`, atomically.

    Raises:
        FileExistsError: the folder already has a record of this identity; records are never overwritten.
    """
    path = _path(record, folder)
    try:
        with files.new_file(path) as file:
            file.write(_text(record))
    except FileExistsError:
        raise _exists(path) from None
    return path


def grow(record: Record, folder: Path) -> Path:
    """`save` a record, or replace an earlier version that the same run wrote, so that an interrupted run keeps its results.

    Raises:
        FileExistsError: the existing record is of another run, with another start time.
    """
    path = _path(record, folder)
    if not path.exists():
        return save(record, folder)
    if load(path).started != record.started:
        raise _exists(path)
    return files.replace_file(path, _text(record))


def load(path: str | Path) -> Record:
    """Read one record.

    Raises:
        RecordError: not JSON, not a record, another schema, numbers out of range, or not what was written.
    """
    try:
        data = parse(Path(path).read_bytes())
    except JsonError as error:
        raise RecordError(f"{path} is not JSON ({error}); a record is written by alibi run or alibi bench") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{path} is JSON but not a record: it has no schema")
    if data["schema"] != SCHEMA:
        found = f"{path} has schema {data['schema']} but this version reads {SCHEMA}"
        raise RecordError(f"{found}; read it with the version that wrote it")
    expected = {field.name for field in dataclasses.fields(Record)}
    if missing := {*expected, "sha256"} - data.keys():
        raise RecordError(f"{path} has no {', '.join(sorted(missing))}, so it is not a complete record")
    try:
        record = Record(**{key: data[key] for key in expected})
        _check_numbers(record)
    except RecordError as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not is_sealed(data):
        found = f"{path} is not what was written: it was damaged or edited, since its sha256 differs"
        raise RecordError(f"{found}; restore it, or measure it again")
    return record


def find(*paths: Path, kind: str | None = None) -> Iterator[Record]:
    """Yields the records in files and folders (searched recursively), in order of path; with `kind` only those of one kind.

    Raises:
        FileNotFoundError: a path does not exist.
        RecordError: a `.json` file is not a record.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; pass record files (.json) or folders that hold them")
        for file in sorted(file for file in path.rglob("*.json") if not file.is_dir()) if path.is_dir() else [path]:
            record = load(file)
            if kind is None or record.kind == kind:
                yield record


def finite(value: object) -> object:
    """The value in a form that JSON supports: NaN, infinity and numbers beyond LARGEST become None, tuples become lists."""
    if isinstance(value, float):
        return value if abs(value) <= LARGEST else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _path(record: Record, folder: Path) -> Path:
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{record.kind}-{record.name}").strip("-")
    return folder / f"{stem}-{identity(record.kind, record.name, record.config)}.json"


def _text(record: Record) -> bytes:
    return sealed({name: finite(value) for name, value in dataclasses.asdict(record).items()}, indent=1) + b"\n"


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists; records are never overwritten: delete it, or write to another folder")


def _check_numbers(record: Record) -> None:
    """Raises RecordError if a column holds a list or mapping, or a number outside the range for its name."""
    tables: dict[str, Curve] = {"metrics": {name: [value] for name, value in record.metrics.items()}}
    tables |= {f"curves.{name}": curve for name, curve in record.curves.items()}
    columns = ((f"{place}.{name}", name, column) for place, table in tables.items() for name, column in table.items())
    for place, name, column in columns:
        bounds = next(((least, most) for names, least, most in _DRAWN if names.fullmatch(name)), None)
        for value in column:
            if value is not None and not isinstance(value, int | float | str):
                raise RecordError(f"{place} has {value!r} but a column holds numbers, texts and null")
            if bounds and value is not None and (isinstance(value, str) or not _within(value, *bounds)):
                allowed = f"{bounds[0]} to {bounds[1]:g}"
                raise RecordError(f"{place} has {value!r} but must be null or a number from {allowed}")
            if isinstance(value, int | float) and abs(value) > LARGEST:
                raise RecordError(f"{place} has {value!r}, more than can be measured")


def _within(value: float, least: float, most: float) -> bool:
    """Whether the value is within the bounds, up to rounding: a share of 1.0000001 and a loss of −1e-7 are allowed."""
    return least - 1e-3 <= value <= most * (1 + 1e-3)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
