"""The paper's studies from `studies.toml`: costs, and models and trainings at each scale. Read next: `wikitext.py`."""

import tomllib
from pathlib import Path
from typing import Any

from alibi_lab.lab.config import RunConfig, Scale
from alibi_lab.recipes.scales import MEDIUM, changed

_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COSTS: dict[str, str] = _READ["costs"]


def fields(study: str) -> dict[Scale, dict[str, dict[str, Any]]]:
    """By scale and section of the config, the fields that a study changes."""
    return {
        scale: {
            section: {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            for section, values in sections.items()
        }
        for scale, sections in _READ[study].items()
    }


def runs(study: str) -> dict[Scale, RunConfig]:
    """The run of a study at each scale; items set its method, lengths and tests."""
    return {
        scale: changed(MEDIUM if scale == "medium" else RunConfig(), **sections)
        for scale, sections in fields(study).items()
    }
