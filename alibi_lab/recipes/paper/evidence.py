"""Finds the records of an item by config: the same model, data, training and evaluation.

Only seeds may differ: runs that are equal except for the seed are repetitions of one number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, cast

from alibi_lab.lab.config import RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.records import Json, Record, RecordError, identity

Kind: TypeAlias = Literal["training", "evaluation", "speed"]

_TRAINED = ("model", "data", "train")
_SECTIONS = {"training": _TRAINED, "evaluation": (*_TRAINED, "eval"), "speed": (*_TRAINED, "eval")}


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
