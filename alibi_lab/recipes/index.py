"""The table of recipes, by name, including one per figure and table of the paper.

To add a recipe, write a file next to this one and add it to `_FILES`. `ITEMS` lists the paper's figures and tables and the
functions that read their answers from records; "paper" runs all of them.
"""

from pathlib import Path
from typing import Any, Unpack

from alibi_lab.lab.config import Recipe, Selection, check_scale
from alibi_lab.lab.config_io import override
from alibi_lab.recipes import curriculum, method_comparison, methods, quick, recall, slope_search, streams, systems
from alibi_lab.recipes.paper.cells import Item, select
from alibi_lab.recipes.paper.items import ITEMS, PAPER

_FILES = (quick, methods, curriculum, recall, method_comparison, streams, slope_search, systems)
RECIPES: dict[str, Recipe] = {one.name: one for one in (*(file.RECIPE for file in _FILES), PAPER)}
RECIPES |= {name: item.recipe for name, item in ITEMS.items()}


def items_of(name: str) -> list[Item]:
    """The paper's figures and tables that a recipe name covers; empty for all other recipes."""
    return list(ITEMS.values()) if name == PAPER.name else [ITEMS[name]] if name in ITEMS else []


def check(name: str, **selection: Unpack[Selection]) -> None:
    """Check overrides of a recipe's fields, and an item's methods, before anything is loaded or written.

    Raises:
        ConfigError: an unknown field, an invalid value, a scale that the recipe does not have, a field that a figure or table
            of the paper varies, or methods that it cannot compare.
    """
    recipe, scale, items = RECIPES[name], selection.get("scale", "small"), items_of(name)
    check_scale(name, scale, recipe.scales)
    for item in items:
        select(item, **selection)
    for config in () if items else recipe.runs(scale):
        override(config, selection.get("overrides", {}))


def run(name: str, **options: Any) -> list[Path]:
    """Run a recipe by name; the paths of its records.

    Args:
        options: as for `experiment.run`.

    Raises:
        ConfigError, ExperimentError, CorpusError, CheckpointError, TrainingError, EvaluationError: see `experiment.run`.
    """
    from alibi_lab.lab import experiment  # loads torch
    from alibi_lab.recipes.paper.run_items import run_items

    items = items_of(name)
    return run_items(items, **options) if items else experiment.run(RECIPES[name], **options)
