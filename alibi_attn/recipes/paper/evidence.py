"""The records that an item is read from, found by the config that was asked for: the same model, text, training and test.

Seeds alone may differ: equal runs with other seeds are repetitions of one number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import cast

from alibi_attn.lab.config import RunConfig
from alibi_attn.lab.fields import to_json
from alibi_attn.records import Json, Record

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


def _key(kind: str, config: Mapping[str, Json], *, seed: bool = True) -> str:
    asked = {section: dict(cast("Mapping[str, Json]", config[section])) for section in _SECTIONS[kind]}
    if not seed:
        del asked["train"]["seed"]
    return json.dumps([kind, asked], sort_keys=True)


def _seed(record: Record) -> int:
    train = cast("Mapping[str, Json]", record.config["train"])
    return cast("int", train["seed"])
