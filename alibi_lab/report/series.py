"""Series: records grouped for figures and tables.

    study    one recipe on one corpus, evaluated in one way; its records can share a figure
    series   one configuration in it, over all its seeds: one line in the figure, one row in the table

Records other than trainings and evaluations of language models belong to no study.
Next: `plots/study.py`, which draws studies, and `page.py`, which writes the page.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from alibi_attn import units
from alibi_lab.position_methods import LOOKS, Look, look_of
from alibi_lab.records import LARGEST, MAX_COUNT, Json, Record, flat, identity

Array = NDArray[np.float64]
Mode = Literal["nonoverlapping", "sliding", "windowed"]
_T = TypeVar("_T")
_K = TypeVar("_K")

MODES: tuple[Mode, ...] = ("nonoverlapping", "sliding", "windowed")

# PI is position interpolation; for ALiBi the slopes are divided, which is equivalent.
STRETCHES = {"linear": "PI", "ntk": "NTK", "yarn": "YaRN"}
_RUN = ("model", "data", "train", "corpus")  # the sections that identify a run; `eval` describes how it was tested


@dataclasses.dataclass(frozen=True)
class Series:
    """One configuration over all its seeds; `stretch` is how its positions were scaled beyond the trained length, `look` the
    label, colors and marker of its method."""

    label: str
    method: str
    trained: int
    trainings: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    stretch: str = "none"
    look: Look | None = None

    @property
    def seeds(self) -> int:
        """The number of evaluated seeds (or trained ones, if none is evaluated yet)."""
        return len(self.evaluations or self.trainings)

    @property
    def short(self) -> str:
        """A short label for figures."""
        return self.label.replace("ALiBi, learned", "learned").replace("half ALiBi, half none", "half ALiBi")

    @property
    def records(self) -> tuple[Record, ...]:
        """Its trainings, then its evaluations."""
        return self.trainings + self.evaluations

    def curve(self, curve: str, x: str, y: str, *, most: float = LARGEST) -> tuple[Array, Array]:
        """Two columns of a curve: x [points] ascending, y [seeds, points], NaN if a seed has no such point or the
        value exceeds `most`."""
        records = self.trainings if curve in ("training", "validation") else self.evaluations
        found = [column_by(record, curve, x, y) for record in records]
        points = sorted({point for column in found for point in column if math.isfinite(point)})
        rows = [[column.get(point, math.nan) for point in points] for column in found]
        values = np.array(rows, dtype=np.float64).reshape(len(found), len(points))
        values = np.where(np.abs(values) <= most, values, math.nan)
        measured = np.isfinite(values)
        some = measured.any(axis=0)
        return np.array(points, dtype=np.float64)[some], values[measured.any(axis=1)][:, some]

    def perplexity(self, length: float, mode: Mode = "nonoverlapping") -> list[float]:
        """exp(mean loss) of each seed at one length; empty if it was not measured."""
        x, y = self.curve("by_length", "length", f"{mode}_nats")
        return [units.perplexity(float(value)) for value in y[:, x == length].ravel() if math.isfinite(value)]

    def ends(self, mode: Mode = "nonoverlapping") -> tuple[int, int] | None:
        """The trained length (the shortest evaluated one if it was not evaluated) and the longest evaluated length."""
        x = [int(length) for length in self.curve("by_length", "length", f"{mode}_nats")[0]]
        return (self.trained if self.trained in x else x[0], x[-1]) if x else None

    def metric(self, name: str) -> list[float]:
        """A metric for each seed, from the trainings, or from the evaluations if no training has it."""
        both = [[record.metrics.get(name) for record in records] for records in (self.trainings, self.evaluations)]
        known = ([float(value) for value in values if value is not None] for values in both)
        return next(filter(None, known), [])


@dataclasses.dataclass(frozen=True)
class Study:
    """One recipe on one corpus, evaluated in one way."""

    recipe: str
    corpus: Mapping[str, Json]
    evaluation: Mapping[str, Json]
    series: tuple[Series, ...]

    @property
    def records(self) -> list[Record]:
        """All records of the study."""
        return [record for s in self.series for record in s.records]

    def per_token(self, what: str) -> float | None:
        """Mean number of "bytes" (1 for a byte-level model) or "words" (separated by spaces) per token; None if it was not
        recorded, and for the words of source code, which has none."""
        source = (what, self.corpus.get("name")) == ("words", "python-source")
        value = None if source else self.corpus.get(f"{what}_per_token")
        return float(value) if isinstance(value, int | float) and value > 0 else None

    @property
    def unit(self) -> str:
        """The unit that the model predicts: "byte" or "token"."""
        return "byte" if self.per_token("bytes") == 1 else "token"

    @functools.cached_property
    def lengths(self) -> list[int]:
        """All evaluated lengths."""
        return sorted({int(length) for s in self.series for length in s.curve("by_length", "length", "length")[0]})

    @functools.cached_property
    def trained(self) -> list[int]:
        """All trained lengths."""
        return sorted({s.trained for s in self.series})

    def ended(self, mode: Mode = "nonoverlapping") -> list[tuple[Series, tuple[int, int]]]:
        """The evaluated series, each with its `ends`."""
        return [(series, ends) for series in self.series if (ends := series.ends(mode))]

    @property
    def seeds(self) -> int:
        """The smallest number of seeds of any series."""
        return min(s.seeds for s in self.series)


def studies(records: Iterable[Record]) -> list[Study]:
    """The studies in the records, in order of recipe; series in the order of LOOKS, then of trained length.

    An evaluation with stretched positions is a separate series in the same study, because the weights are the same.
    """
    of_models = (r for r in records if r.kind in ("training", "evaluation") and _method(r) and _trained(r) > 0)
    unique = {identity(r.kind, r.name, r.config): r for r in of_models}  # one may be passed twice
    runs = grouped(unique.values(), _key)
    groups: dict[tuple[str, str, str], dict[tuple[str, str], list[Record]]] = {}
    for (recipe, run), members in runs.items():
        trainings, evaluations = ([r for r in members if r.kind == kind] for kind in ("training", "evaluation"))
        for record in evaluations or trainings:
            test = {name: value for name, value in section(record, "eval").items() if name != "stretch"}
            group = groups.setdefault((recipe, _text(record.config.get("corpus")), _text(test)), {})
            group.setdefault((run, _stretch(record)), [*trainings] if evaluations else []).append(record)
    return [_study(recipe, runs) for (recipe, _, _), runs in sorted(groups.items())]


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """The items by their keys, in order."""
    found: dict[_K, list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def section(record: Record, name: str) -> Mapping[str, Json]:
    """A section of a record's config; empty if it has none."""
    value = record.config.get(name)
    return value if isinstance(value, Mapping) else {}


def sequence(value: Json) -> Sequence[Json]:
    """A list in a record's config; empty if the value is not a list."""
    return value if isinstance(value, list | tuple) else ()


def field(record: Record, name: str, key: str, default: _T) -> _T:
    """A field of a section of a record's config; the default if it is missing or of another type."""
    value = section(record, name).get(key)
    return value if isinstance(value, type(default)) else default


def seed_of(record: Record) -> int:
    """The seed of the training."""
    return field(record, "train", "seed", 0)


def by_seed(records: Iterable[Record]) -> dict[int, Record]:
    """The records by the seed of their training."""
    return {seed_of(record): record for record in records}


def numbers(record: Record, curve: str, column: str) -> list[float]:
    """A column of a curve as floats, NaN for null. A missing column is all NaN."""
    return floats(record.curves.get(curve, {}), column)


def column_by(record: Record, curve: str, x: str, y: str) -> dict[float, float]:
    """A column of a curve by the values of another."""
    return dict(zip(numbers(record, curve, x), numbers(record, curve, y), strict=True))


def floats(columns: Mapping[str, Sequence[Json]], name: str) -> list[float]:
    """A column as floats, NaN for null. A missing one is all NaN."""
    values: Sequence[Json] = columns.get(name) or [None] * max(map(len, columns.values()), default=0)
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def plain_text(value: Json) -> str:
    """A value in a record's config as text."""
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(plain_text, value))
    return value if isinstance(value, str) else _text(value)


def _study(recipe: str, runs: Mapping[tuple[str, str], Sequence[Record]]) -> Study:
    last = [members[-1] for members in runs.values()]  # an evaluation if there is one
    configs = [_settings(record.config) for record in last]
    names = {name for config in configs for name in config if name.startswith(("model.", "data.", "train."))}
    names -= {"model.method", "train.length"}
    differing = [name for name in sorted(names) if len({_text(config.get(name)) for config in configs}) > 1]
    short = [(_method(record), _trained(record), _stretch(record)) for record in last]
    series = []
    for key, config, members in zip(short, configs, runs.values(), strict=True):
        method, trained, stretch = key
        look = LOOKS.get(method) or look_of(section(members[-1], "method"))
        label = look.label if look else method
        if len({length for _, length, _ in short}) > 1:
            label += f" {trained:,}"
        if stretch != "none":
            label += f" with {STRETCHES.get(stretch, stretch)}"
        if short.count(key) > 1:
            label += _difference(config, differing)
        trainings = tuple(sorted((r for r in members if r.kind == "training"), key=seed_of))
        evaluations = tuple(sorted((r for r in members if r.kind == "evaluation"), key=seed_of))
        series.append(Series(label, method, trained, trainings, evaluations, stretch, look))
    order = list(LOOKS)
    series.sort(key=lambda s: ([*order, s.method].index(s.method), s.method, s.trained, s.label))
    plain = next((record for record in last if _stretch(record) == "none"), last[0])
    return Study(recipe, section(last[0], "corpus"), section(plain, "eval"), tuple(series))


def _difference(config: Mapping[str, Json], names: Sequence[str]) -> str:
    """How a run differs from others of its method and length: " (steps 40)", " (staged from 64)"."""
    named = [name for name in names if name not in ("train.first_length", "train.first_steps")]
    parts = [f"{name.split('.', 1)[1]} {plain_text(config.get(name))}" for name in named]
    if config.get("train.first_length") is not None and "train.first_length" in names:
        parts.append(f"staged from {plain_text(config['train.first_length'])}")
    return f" ({', '.join(parts)})" if parts else ""


def _method(record: Record) -> str:
    return field(record, "model", "method", "")


def _trained(record: Record) -> int:
    length = field(record, "train", "length", 0)
    return length if length <= MAX_COUNT else 0


def _stretch(record: Record) -> str:
    return field(record, "eval", "stretch", "none")


def _key(record: Record) -> tuple[str, str]:
    """The key that all seeds of a run share: its recipe (the first part of the name), and its config without the evaluation."""
    return record.name.partition("/")[0], _text(_settings({key: record.config.get(key) for key in _RUN}))


def _settings(config: Mapping[str, Json]) -> dict[str, Json]:
    """The flat config without the seed."""
    return {name: value for name, value in flat(config).items() if name.rpartition(".")[2] != "seed"}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
