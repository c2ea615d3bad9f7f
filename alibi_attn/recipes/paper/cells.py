"""What an item of the paper is made of: cells, each a number of a figure or table and the run that it is read from.

An item's runs are the runs of its cells, and its answer is read from the records of exactly these configs: an item
cannot be answered by another one's data. Read next: `wikitext.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from alibi_attn.lab.config import ConfigError, Recipe, RunConfig, Scale
from alibi_attn.lab.fields import field_names, override
from alibi_attn.records import Json

if TYPE_CHECKING:
    from alibi_attn.recipes.paper.evidence import Evidence

Way: TypeAlias = Literal["nonoverlapping", "sliding"]
Curves: TypeAlias = dict[str, dict[str, list[Json]]]

SHRUNK: dict[Scale, int] = {"paper": 1, "medium": 4, "small": 8, "smoke": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an item.

    Args:
        label: the series of the figure, or the row of the table, as the paper calls it.
        config: the training and the evaluation that give the number.
        paper_length: L_valid, or L where the number is of a training, as published.
        length: the same at this scale.
        column: which column of a row it stands in.
        way: how the tokens were cut where it is a perplexity.
        seeds: the number is the mean of so many runs, paired across methods: seed by seed the data's order is the same.
    """

    label: str
    config: RunConfig
    paper_length: int
    length: int
    column: str = "perplexity"
    way: Way = "nonoverlapping"
    seeds: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A figure or table: its recipe, its cells at every scale, and how the records become an answer."""

    recipe: Recipe
    cells: Callable[[Scale], tuple[Cell, ...]]
    answer: Callable[[Sequence[Cell], "Evidence"], Curves]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """An item as it was asked for: its cells and their runs with the changes and seeds of the command."""

    item: Item
    cells: tuple[Cell, ...]
    runs: tuple[RunConfig, ...]


def scaled(paper_length: int, scale: Scale) -> int:
    """A length of the paper at a scale, a quarter at medium, an eighth at small, a 64th at smoke, rounded up so that L + 1 stays
    longer than L.

    >>> [scaled(length, "small") for length in (512, 513, 3072)]
    [64, 65, 384]
    """
    return -(-paper_length // SHRUNK[scale])


def configs(cells: Sequence[Cell]) -> tuple[RunConfig, ...]:
    """The runs that the cells are read from, each once: all with the first seed, then the repetitions."""
    found = []
    for repetition in range(max((cell.seeds for cell in cells), default=0)):
        for cell in cells:
            if repetition < cell.seeds:
                train = dataclasses.replace(cell.config.train, seed=cell.config.train.seed + repetition)
                found.append(dataclasses.replace(cell.config, train=train))
    return tuple(dict.fromkeys(found))


def ask(item: Item, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int]) -> Asked:
    """The item with fields changed by name.

    Raises:
        ConfigError: an unknown field or value, or a field that this item varies.
    """
    cells = item.cells(scale)
    for name in overrides:
        section, _, field = name.partition(".")
        if name in field_names() and len({getattr(getattr(cell.config, section), field) for cell in cells}) > 1:
            raise ConfigError(f"{item.recipe.name} is about {name} and has several; it cannot be changed to one value")
    changed = tuple(dataclasses.replace(cell, config=override(cell.config, overrides)) for cell in cells)
    runs = configs(changed)
    if seeds:
        runs = tuple(dict.fromkeys(override(run, {"train.seed": str(seed)}) for seed in seeds for run in runs))
    return Asked(item=item, cells=changed, runs=runs)
