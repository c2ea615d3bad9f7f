"""The records that an item is read from, found by the config that was asked for: the same model, text, training and test.

Seeds alone may differ: equal runs with other seeds are repetitions of one number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import cast

from alibi_attn.lab.config import RunConfig
from alibi_attn.lab.fields import to_json
from alibi_attn.records import Json, Record, RecordError, identity

_SECTIONS = {
    "training": ("model", "data", "train"),
    "evaluation": ("model", "data", "train", "eval"),
    "speed": ("model", "data", "train", "eval"),
}


class MissingEvidenceError(ValueError):
    """An answer asks for a run that is not recorded."""


class Evidence:
    """The records of some runs, and of no others.

    Args:
        records: by the name of the file.
        runs: whose records count, with their seeds.
    """

    def __init__(self, records: Mapping[str, Record], runs: Iterable[RunConfig]) -> None:
        wanted = {_key(kind, to_json(run)) for run in runs for kind in _SECTIONS}
        self.files: list[str] = []
        self._found: dict[str, list[Record]] = {}
        for name, record in sorted(records.items()):
            sections = [record.config.get(section) for section in _SECTIONS.get(record.kind, ())]
            if not all(isinstance(section, Mapping) for section in sections):
                raise RecordError(f"{name} is damaged: its config lacks a section; delete it and run again")
            if record.kind in _SECTIONS and _key(record.kind, record.config) in wanted:
                self.files.append(name)
                self._found.setdefault(_key(record.kind, record.config, seed=False), []).append(record)

    def training(self, config: RunConfig) -> list[Record]:
        """The trainings of a config, by seed."""
        return self._of("training", config)

    def evaluation(self, config: RunConfig) -> list[Record]:
        """The evaluations of a config, by seed of the training."""
        return self._of("evaluation", config)

    def speed(self, config: RunConfig) -> list[Record]:
        """The measurements of a config (`speed.py`)."""
        return self._of("speed", config)

    def _of(self, kind: str, config: RunConfig) -> list[Record]:
        found = self._found.get(_key(kind, to_json(config), seed=False), [])
        if not found:
            raise MissingEvidenceError(
                f"there is no {kind} of {config.model.method} at {config.train.length} tokens among the records; run the item"
            )
        return sorted(found, key=_seed)


def metric(record: Record, name: str) -> float | None:
    """A metric of a record; MissingEvidenceError where it has none of that name."""
    if name not in record.metrics:
        raise _lacking(record, f"metric {name}")
    return record.metrics[name]


def at_length(record: Record, length: int, column: str) -> float | None:
    """A column of an evaluation at one length; MissingEvidenceError where there is no such place."""
    curve = record.curves.get("by_length", {})
    lengths = list(curve.get("length", ()))
    if length not in lengths or column not in curve:
        raise _lacking(record, f"{column} at {length} tokens")
    return cast("float | None", curve[column][lengths.index(length)])


def _lacking(record: Record, what: str) -> MissingEvidenceError:
    digits = identity(record.kind, record.name, record.config)
    return MissingEvidenceError(
        f"the record of {record.kind} {record.name} ({digits}) has no {what}; delete the file and run the item again"
    )


def _key(kind: str, config: Mapping[str, Json], *, seed: bool = True) -> str:
    asked = {section: dict(cast("Mapping[str, Json]", config[section])) for section in _SECTIONS[kind]}
    if not seed:
        del asked["train"]["seed"]
    return json.dumps([kind, asked], sort_keys=True)


def _seed(record: Record) -> int:
    train = cast("Mapping[str, Json]", record.config["train"])
    return cast("int", train["seed"])
