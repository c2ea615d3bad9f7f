"""The paper's studies from `studies.toml`: costs, seeds, and models and trainings at each scale. Read next: `wikitext.py`."""

import tomllib
from pathlib import Path
from typing import Any

from alibi_lab.lab.config import RunConfig, Scale
from alibi_lab.lab.config_io import from_json, to_json
from alibi_lab.recipes.scales import MEDIUM

_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COSTS: dict[str, str] = _READ["costs"]
SEEDS: dict[str, dict[str, int]] = _READ["seeds"]


def changed_by(study: str, scale: Scale, run: RunConfig) -> RunConfig:
    """The run with the fields that a study sets at a scale; they are checked like those of a record.

    >>> changed_by("books", "small", RunConfig()).data.tokenizer
    'bpe:1024'
    """
    config: dict[str, Any] = dict(to_json(run))
    return from_json({section: {**config[section], **_READ[study][scale].get(section, {})} for section in config})


def runs(study: str) -> dict[Scale, RunConfig]:
    """The run of a study at each scale; items set its method, lengths and tests."""
    return {scale: changed_by(study, scale, MEDIUM if scale == "medium" else RunConfig()) for scale in _READ[study]}
