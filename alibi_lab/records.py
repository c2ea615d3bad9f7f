"""Records: each result as JSON, with what was run, where, and the numbers.

Every measurement of this package (a training, an evaluation, a benchmark, an attack on the certificate) is saved as a record,
and every figure and table is a pure function of records. Records are small, readable and never overwritten.

A run writes one file per record, `KEY.json`. `pack` collects the records of a study in one JSON Lines file: one record per line,
sorted by key, each with its key in front and its checksum. A packed record's place is `FILE.jsonl#KEY`; every function that takes
or returns the path of a record supports both forms.
"""

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from alibi_attn import files
from alibi_attn.strict_json import JsonError, is_sealed, parse, sealed
from alibi_lab.provenance import command, commit, kernels, machine, versions

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
SCHEMA = 1
PACKED = ".jsonl"  # the ending of files with many records
_KEYED = re.compile(rb'\{"key": "([\w.-]+)", ')
SPEEDS = ("benchmark", "speed")  # kinds of records that measure time; their versions have a hash of the kernels
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


def age(record: Record) -> str:
    """Why a record of speed does not describe the present kernels; "" if it does, or if it is not about speed."""
    if record.kind not in SPEEDS or record.versions.get("kernels") == kernels():
        return ""
    if "kernels" in record.versions:
        return "measured with other kernels than the present ones"
    return "measured by an older version, which kept no hash of the kernels"


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
    """The place of the record with this identity in the folder; None if there is none."""
    return with_identity(folder, identity(kind, name, config))


def with_identity(folder: Path, digits: str) -> Path | None:
    """The place of the record with these digits of `identity`; None if there is none."""
    if found := next(folder.glob(f"*-{digits}.json"), None):
        return found
    packed = (_place(file, name) for file in sorted(folder.glob("*.jsonl")) for name, _ in _lines(file))
    return next((place for place in packed if place.name.endswith(f"-{digits}")), None)


def key(record: Record) -> str:
    """The record's key, `<kind>-<name>-<identity>`: the name of its file without ".json"."""
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{record.kind}-{record.name}").strip("-")
    return f"{stem}-{identity(record.kind, record.name, record.config)}"


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
    expect_new(folder, record.kind, record.name, record.config)
    path = folder / f"{key(record)}.json"
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
    path = folder / f"{key(record)}.json"
    if not path.exists():
        return save(record, folder)
    if load(path).started != record.started:
        raise _exists(path)
    return files.replace_file(path, _text(record))


def load(path: str | Path) -> Record:
    """Read one record: a file, or `FILE.jsonl#KEY`.

    Raises:
        RecordError: not JSON, not a record, another schema, numbers out of range, or not what was written.
    """
    file, mark, name = str(path).partition(f"{PACKED}#")
    text = _line(Path(f"{file}{PACKED}"), name) if mark else Path(path).read_bytes()
    return _record(_parsed(text, path), path)


def find(*paths: Path, kind: str | None = None) -> Iterator[Record]:
    """Yields the records in files and folders (searched recursively), in order of path; with `kind` only those of one kind.

    Raises:
        FileNotFoundError: a path does not exist.
        RecordError: a `.json` file or a line of a `.jsonl` file is not a record.
    """
    for path in paths:
        for record, _ in _found(path):
            if kind is None or record.kind == kind:
                yield record


def pack(paths: Iterable[Path], out: Path, *, replace: bool = False) -> int:
    """Adds the records in files and folders to one JSON Lines file, sorted by key; returns how many the file then holds.

    Args:
        replace: a new record replaces one with the same key; otherwise this is an error, unless both are equal.

    Raises:
        FileExistsError: `out` has another record with the same key; nothing is written.
        FileNotFoundError, RecordError: see `find`.
    """
    if out.suffix != PACKED:
        raise ValueError(f"{out} must end in {PACKED}; a packed file has one record per line")
    packed: dict[str, Mapping[str, object]] = {}
    for path in [*([out] if out.exists() else []), *paths]:
        for record, data in _found(path):
            name = key(record)
            if path != out and not replace and packed.get(name, data) != data:
                raise FileExistsError(f"{out} has another record {name}; pass --replace to replace it")
            packed[name] = data
    lines = (b'{"key": "%s", %s\n' % (name.encode(), sealed(data)[1:]) for name, data in sorted(packed.items()))
    files.replace_file(out, b"".join(lines))
    return len(packed)


def rows(*paths: Path, curve: str = "") -> list[dict[str, Json]]:
    """One row per record of `find`: kind, name, started, seconds; config and metrics with dotted names ("config.train.steps").

    Args:
        curve: name of a curve; then one row for each of its rows, such as "by_length" for the losses at every length.
    """
    found = list[dict[str, Json]]()
    for one in find(*map(Path, paths)):
        row = {name: getattr(one, name) for name in ("kind", "name", "started", "seconds")}
        row |= flat({"config": one.config, "metrics": one.metrics})
        columns = one.curves.get(curve, {})
        points = [dict(zip(columns, point, strict=True)) for point in zip(*columns.values(), strict=True)]
        found += [row | point for point in points] if curve else [row]
    return found


def table(*paths: Path, curve: str = "") -> "pandas.DataFrame":
    """The `rows` as a pandas frame. Raises ImportError without pandas, which is not installed with this package."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ImportError("records.table needs pandas; run pip install pandas, or use records.rows") from None
    return pandas.DataFrame(rows(*paths, curve=curve))


def flat(config: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """A nested config as a flat one with dotted names, as for `--set`: {"train.steps": 200}."""
    found: dict[str, Json] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def finite(value: object) -> object:
    """The value in a form that JSON supports: NaN, infinity and numbers beyond LARGEST become None, tuples become lists."""
    if isinstance(value, float):
        return value if abs(value) <= LARGEST else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _found(path: Path) -> Iterator[tuple[Record, Mapping[str, object]]]:
    """The records in a file or folder, each with its JSON without the checksum."""
    for place, text in _texts(path):
        data = _parsed(text, place)
        yield _record(data, place), {name: value for name, value in data.items() if name != "sha256"}


def _texts(path: Path) -> Iterator[tuple[Path, bytes]]:
    """(place, JSON) of the records in a folder, a file, or `FILE.jsonl#KEY`."""
    file, mark, name = str(path).partition(f"{PACKED}#")
    if mark and Path(f"{file}{PACKED}").exists():
        yield path, _line(Path(f"{file}{PACKED}"), name)
    elif path.is_dir():
        for inside in sorted(one for one in path.rglob("*") if one.suffix in (".json", PACKED) and not one.is_dir()):
            yield from _texts(inside)
    elif not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass record files (.json, {PACKED}) or folders that hold them")
    elif path.suffix == PACKED:
        for name, line in _lines(path):
            yield _place(path, name), line
    else:
        yield path, path.read_bytes()


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """(key, JSON without the key) of every line of a packed file."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        match = _KEYED.match(line)
        if match is None:
            raise RecordError(f"line {number} of {file} is not a record: it does not begin with a key")
        yield match[1].decode(), b"{" + line[match.end() :]


def _line(file: Path, name: str) -> bytes:
    line = next((line for found, line in _lines(file) if found == name), None)
    if line is None:
        raise RecordError(f"{file} has no record {name!r}; its lines begin with their keys")
    return line


def _place(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}#{name}")


def _parsed(text: bytes, place: str | Path) -> dict[str, object]:
    try:
        data = parse(text)
    except JsonError as error:
        raise RecordError(f"{place} is not JSON ({error}); a record is written by alibi run or alibi bench") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{place} is JSON but not a record: it has no schema")
    return data


def _record(data: Mapping[str, object], place: str | Path) -> Record:
    if data["schema"] != SCHEMA:
        found = f"{place} has schema {data['schema']} but this version reads {SCHEMA}"
        raise RecordError(f"{found}; read it with the version that wrote it")
    expected = {field.name for field in dataclasses.fields(Record)}
    if missing := {*expected, "sha256"} - data.keys():
        raise RecordError(f"{place} has no {', '.join(sorted(missing))}, so it is not a complete record")
    try:
        record = Record(**{name: data[name] for name in expected})  # type: ignore[arg-type]
        _check_numbers(record)
    except RecordError as error:
        raise RecordError(f"{place} is damaged: {error}") from None
    if not is_sealed(data):
        found = f"{place} is not what was written: it was damaged or edited, since its sha256 differs"
        raise RecordError(f"{found}; restore it, or measure it again")
    if "#" in str(place) and not str(place).endswith(f"{PACKED}#{key(record)}"):
        raise RecordError(f"{place} is damaged: the key of this record is {key(record)}")
    return record


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
