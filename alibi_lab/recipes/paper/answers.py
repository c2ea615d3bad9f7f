"""Turn records into the data of figures and tables: pure functions, one per form that the paper uses.

Perplexities are per token of our tokenizer, `exp` of the mean loss; if the text's words were counted, "word_…" is the
perplexity per word. Repeated seeds are averaged in nats, their speeds by the geometric mean; "low" and "high" are their
minimum and maximum. Where the paper evaluates one way only, nonoverlapping or with a sliding window (appendix B), the
other way is given as well.

`Evidence` finds the records of an item by config: the same model, data, training and evaluation. Only seeds may differ: runs that
are equal except for the seed are repetitions of one number. Two figures compare no models: the biases that ALiBi adds (figure 3),
and how a text is divided (figure 10).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from alibi_attn import alibi_slopes, units
from alibi_lab.lab.config import EvalConfig, RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.recipes.paper.cells import Cell, Curves, Way
from alibi_lab.records import Json, Record, RecordError, identity

Kind: TypeAlias = Literal["training", "evaluation", "speed"]

_TRAINED = ("model", "data", "train")
_SECTIONS = {"training": _TRAINED, "evaluation": (*_TRAINED, "eval"), "speed": (*_TRAINED, "eval")}
WORDS = ("The", "big", "gray", "cat", "sat", "on", "the", "mat")  # figure 10
WINDOW = 4
AS_DRAWN = EvalConfig(lengths=(WINDOW,), stride=1, tokens=8192)  # figure 10 on a trained model
_OTHER: dict[Way, Way] = {"nonoverlapping": "sliding", "sliding": "nonoverlapping"}


class MissingEvidenceError(ValueError):
    """An answer needs a run that is not recorded."""


class Evidence:
    """The records of the given runs only.

    Args:
        records: all records, by file name.
        runs: the runs whose records to use, with their seeds.
    """

    def __init__(self, records: Mapping[str, Record], runs: Iterable[RunConfig]) -> None:
        keys = {_key(kind, to_json(run)) for run in runs for kind in _SECTIONS}
        self.files: list[str] = []
        self._found: dict[str, list[Record]] = {}
        for name, record in sorted(records.items()):
            sections = [record.config.get(section) for section in _SECTIONS.get(record.kind, ())]
            if not all(isinstance(section, Mapping) for section in sections):
                raise RecordError(f"{name} is damaged: a section is missing from its config; delete it and run again")
            if record.kind in _SECTIONS and _key(record.kind, record.config) in keys:
                self.files.append(name)
                self._found.setdefault(_key(record.kind, record.config, seed=False), []).append(record)

    def matching(self, kind: Kind, config: RunConfig) -> list[Record]:
        """The records of one kind of a config, sorted by the training's seed."""
        found = self._found.get(_key(kind, to_json(config), seed=False), [])
        if not found:
            raise MissingEvidenceError(
                f"there is no {kind} of {config.model.method} at {config.train.length} tokens among the records; run the item"
            )
        return sorted(found, key=_seed)


def metric(record: Record, name: str) -> float | None:
    """A metric of a record; raises MissingEvidenceError if the record does not have it."""
    if name not in record.metrics:
        raise _missing(record, f"metric {name}")
    return record.metrics[name]


def at_length(record: Record, length: int, column: str) -> float | None:
    """A column of an evaluation at one length; raises MissingEvidenceError if the record does not have it."""
    curve = record.curves.get("by_length", {})
    lengths = list(curve.get("length", ()))
    if length not in lengths or column not in curve:
        raise _missing(record, f"{column} at {length} tokens")
    return cast("float | None", curve[column][lengths.index(length)])


def by_length(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Perplexity by L_valid: a curve of a figure, or a row or column of a table."""
    return _rows((cell, {**_lengths(cell), **_tested(cell, evidence)}) for cell in cells)


def models(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """One row per model: size, speed, and perplexity on the validation and test texts (tables 6, 7, 9, 10)."""
    curves: Curves = {}
    for cell in cells:
        test, other = _tested(cell, evidence), _OTHER[cell.way]
        row = {
            **_lengths(cell),
            "parameters": metric(evidence.matching("evaluation", cell.config)[0], "parameters"),
            "train_tokens_per_second": _training_speed(cell, evidence),
            "seeds": test["seeds"],
            cell.column: test["perplexity"],
            f"{other}_{cell.column}": test[f"{other}_perplexity"],
            cell.column.replace("perplexity", "tokens"): test["tokens"],
        }
        if cell.column == "valid_perplexity":
            row["evaluation_tokens_per_second"] = test["tokens_per_second"]
            row["word_valid_perplexity"] = test["word_perplexity"]
        curves.setdefault(cell.label, {}).update({name: [value] for name, value in row.items()})
    return curves


def frontier(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Training speed and perplexity (figure 8)."""
    rows = []
    for cell in cells:
        row = {**_lengths(cell), "train_tokens_per_second": _training_speed(cell, evidence), **_tested(cell, evidence)}
        row["evaluation_tokens_per_second"] = row.pop("tokens_per_second")
        rows.append((cell, row))
    return _rows(rows)


def through_training(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Validation perplexity over time; sinusoidal curves stop when the ALiBi model has finished its updates (figure 5)."""
    points = ((cell, point) for cell in cells for point in _validations(cell, cells, evidence))
    return _rows((cell, {**_lengths(cell), **point}) for cell, point in points)


def equal_time(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """The last point of each curve of figure 5, and the peak memory (table 11)."""
    rows = []
    for cell in cells:
        points = _validations(cell, cells, evidence)
        last = points[-1] if points else {}
        columns = {other.column: last.get("perplexity") if other.column == cell.column else None for other in cells}
        memory = metric(evidence.matching("training", cell.config)[0], "peak_memory_bytes")
        rest = {name: last.get(name) for name in ("updates", "hours", "tokens")}
        rows.append((cell, {"memory_bytes": memory, **rest, **columns}))
    return _rows(rows)


def equal_updates(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """All models after their last update, at every length (table 12)."""
    curves: Curves = {}
    for cell in cells:
        training, test = evidence.matching("training", cell.config)[0], _tested(cell, evidence)
        row = {
            "memory_bytes": metric(training, "peak_memory_bytes"),
            "hours": _hours(metric(training, "seconds")),
            "updates": cell.config.train.steps,
            cell.column: test["perplexity"],
            f"sliding_{cell.column}": test["sliding_perplexity"],
            "tokens": test["tokens"],
        }
        columns = curves.setdefault(cell.label, {other.column: [None] for other in cells})
        columns.update({name: [value] for name, value in row.items()})
    return curves


def speeds(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Tokens per second and memory of each method at each length, means over seeds (figures 2 and 7, table 1)."""
    rows = []
    for cell in cells:
        found = evidence.matching("speed", cell.config)
        means = {name: _geometric_mean([metric(one, name) for one in found]) for name in found[0].metrics}
        rows.append((cell, {**_lengths(cell), **means, "seeds": len(found)}))
    return _rows(rows)


def slopes(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Each head's slope, and the bias it adds to keys 0, 1, 2, 3 and 4 tokens back, for 8 and for 16 heads."""
    curves: Curves = {}
    for heads in (8, 16):
        values = alibi_slopes(heads).tolist()
        biases = {f"bias_{distance}": [0.0 - slope * distance for slope in values] for distance in range(5)}
        curves[f"ALiBi, {heads} heads"] = {"head": list(range(1, heads + 1)), "slope": values, **biases}
    return curves


def windows(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """For each of eight words: the pass that scores it, its context length, and a trained model's loss at that length."""
    curves: Curves = {}
    for cell in cells:
        stride = WINDOW if cell.way == "nonoverlapping" else 1
        passes = [max(0, -(-(token + 1 - WINDOW) // stride)) for token in range(len(WORDS))]
        contexts = [token - number * stride + 1 for token, number in enumerate(passes)]
        record = evidence.matching("evaluation", cell.config)[0]
        position = record.curves["by_position"]
        loss = dict(zip(position["position"], position["loss_nats"], strict=True))
        curves[cell.label] = {
            "token": list(range(1, len(WORDS) + 1)),
            "word": list(WORDS),
            "context": list(contexts),
            "pass": [number + 1 for number in passes],
            "loss_nats": [loss[context] for context in contexts],
            "whole_text_nats": [record.curves["by_length"][f"{cell.way}_nats"][0]] * len(WORDS),
        }
    return curves


def _tested(cell: Cell, evidence: Evidence) -> dict[str, Json]:
    evaluations = evidence.matching("evaluation", cell.config)

    def at(column: str) -> list[float | None]:
        return [at_length(record, cell.length, column) for record in evaluations]

    nats, other = at(f"{cell.way}_nats"), _OTHER[cell.way]
    rising: Sequence[float | None] = [None] if None in nats else sorted(cast("list[float]", nats))
    corpus = cast("Mapping[str, Json]", evaluations[0].config["corpus"])
    return {
        "perplexity": _perplexity(nats),
        "low": _perplexity(rising[:1]),
        "high": _perplexity(rising[-1:]),
        "word_perplexity": _perplexity(nats, cast("float | None", corpus.get("words_per_token"))),
        f"{other}_perplexity": _perplexity(at(f"{other}_nats")),
        "tokens": at(f"{cell.way}_tokens")[0],
        "seeds": len(evaluations),
        "tokens_per_second": _geometric_mean(at("tokens_per_second")),
    }


def _validations(cell: Cell, cells: Sequence[Cell], evidence: Evidence) -> list[dict[str, Json]]:
    """The points of a training's validation curve up to the time at which the ALiBi model of the same L_valid finished."""
    (rival,) = (one for one in cells if (one.paper_length, one.config.model.method) == (cell.paper_length, "alibi"))
    stop = metric(evidence.matching("training", rival.config)[0], "seconds")
    curve = evidence.matching("training", cell.config)[0].curves["validation"]
    points = []
    columns = (curve[name] for name in ("step", "seconds", "nats", "tokens"))
    for step, seconds, nats, tokens in zip(*columns, strict=True):
        if cell is rival or stop is None or cast("float", seconds) <= stop:
            perplexity = _perplexity([cast("float | None", nats)])
            points.append({"hours": _hours(seconds), "updates": step, "perplexity": perplexity, "tokens": tokens})
    return points


def _lengths(cell: Cell) -> dict[str, Json]:
    return {"paper_length": cell.paper_length, "length": cell.length}


def _rows(rows: Iterable[tuple[Cell, Mapping[str, Json]]]) -> Curves:
    """The columns of these rows, by the label of the cell."""
    curves: Curves = {}
    for cell, row in rows:
        columns = curves.setdefault(cell.label, {})
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return curves


def _perplexity(nats: Sequence[float | None], words_per_token: float | None = 1.0) -> float | None:
    """Of the mean; None if a loss or the number of words is unknown, and if it is infinite, which JSON cannot be."""
    if None in nats or not words_per_token:
        return None
    mean = sum(cast("Sequence[float]", nats)) / len(nats)
    value = units.word_perplexity(mean, words_per_token=words_per_token)
    return value if math.isfinite(value) else None


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """As the verdicts take it over seeds: of ratios it is the ratio of the means."""
    return None if None in values else math.prod(cast("Sequence[float]", values)) ** (1 / len(values))


def _training_speed(cell: Cell, evidence: Evidence) -> float | None:
    trainings = evidence.matching("training", cell.config)
    return _geometric_mean([metric(record, "tokens_per_second") for record in trainings])


def _hours(seconds: Json) -> float | None:
    return None if seconds is None else cast("float", seconds) / 3600


def _missing(record: Record, what: str) -> MissingEvidenceError:
    digits = identity(record.kind, record.name, record.config)
    return MissingEvidenceError(
        f"the record of {record.kind} {record.name} ({digits}) has no {what}; delete the file and run the item again"
    )


def _key(kind: str, config: Mapping[str, Json], *, seed: bool = True) -> str:
    sections = {section: dict(cast("Mapping[str, Json]", config[section])) for section in _SECTIONS[kind]}
    if not seed:
        del sections["train"]["seed"]
    return json.dumps([kind, sections], sort_keys=True)


def _seed(record: Record) -> int:
    train = cast("Mapping[str, Json]", record.config["train"])
    return cast("int", train["seed"])
