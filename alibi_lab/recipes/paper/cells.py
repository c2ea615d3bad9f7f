"""The cells of an item of the paper: each is one number of a figure or table, with the run that produces it.

An item's runs are the runs of its cells. Its answer is read from the records of exactly these configs, so that data of another
item cannot answer it. Read next: `studies.py`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from alibi_lab.lab.config import ConfigError, Recipe, RunConfig, Scale, Selection, check_scale
from alibi_lab.lab.config_io import field_names, override
from alibi_lab.lab.scales import changed
from alibi_lab.records import Json

if TYPE_CHECKING:
    from alibi_lab.recipes.paper.answers import Evidence

Way: TypeAlias = Literal["nonoverlapping", "sliding"]
Curves: TypeAlias = dict[str, dict[str, list[Json]]]

_COMPARED = "alibi"
SHRUNK: dict[Scale, int] = {"paper": 1, "gpu": 1, "medium": 4, "small": 8, "smoke": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of an item.

    Args:
        label: the series of the figure or the row of the table, as named in the paper.
        config: the training and the evaluation that produce the number.
        paper_length: the published L_valid, or L if the number describes a training.
        length: `paper_length` at this scale.
        column: its column in the row.
        way: for a perplexity, how the text is divided.
        seeds: the number of runs that are averaged. For each seed, all methods read the data in the same order.
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
    """A figure or table: its recipe, its cells at each scale, and the function that computes its answer from records."""

    recipe: Recipe
    cells: Callable[[Scale], tuple[Cell, ...]]
    answer: Callable[[Sequence[Cell], "Evidence"], Curves]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedItem:
    """An item with the overrides and seeds of a command applied to its cells and runs."""

    item: Item
    cells: tuple[Cell, ...]
    runs: tuple[RunConfig, ...]


def scaled(paper_length: int, scale: Scale) -> int:
    """A length of the paper at a scale: a quarter at medium, an eighth at small, a 64th at smoke.

    Rounded up, so that L + 1 stays longer than L.

    >>> [scaled(length, "small") for length in (512, 513, 3072)]
    [64, 65, 384]
    """
    return -(-paper_length // SHRUNK[scale])


def tested(run: RunConfig, paper_lengths: Iterable[int], scale: Scale, **options: Any) -> RunConfig:
    """The run evaluated at these lengths of the paper; `options` are further fields of its evaluation."""
    return changed(run, eval={"lengths": tuple(scaled(length, scale) for length in paper_lengths), **options})


def configs(cells: Sequence[Cell]) -> tuple[RunConfig, ...]:
    """The distinct runs of the cells: all with the first seed, then the repetitions."""
    most = max((cell.seeds for cell in cells), default=0)
    repeated = [(cell.config, n) for n in range(most) for cell in cells if n < cell.seeds]
    return tuple(dict.fromkeys(changed(run, train={"seed": run.train.seed + n}) for run, n in repeated))


def by_study(selected: Sequence[SelectedItem], shard: tuple[int, int] = (0, 1)) -> dict[str, tuple[RunConfig, ...]]:
    """The distinct runs of each study, in order. A shard measures no speed: other processes may run beside it."""
    runs: dict[str, dict[RunConfig, None]] = {}
    for one in selected:
        if one.item.recipe.study == "speed" and shard[1] > 1:
            continue
        runs.setdefault(one.item.recipe.study, {}).update(dict.fromkeys(one.runs))
    return {study: tuple(distinct) for study, distinct in runs.items()}


def select(item: Item, **selection: Unpack[Selection]) -> SelectedItem:
    """The item with a selection applied: overrides, seeds, and position methods instead of the paper's.

    Raises:
        ConfigError: an unknown field, an invalid value, a scale that the item does not have, a field that it varies, or methods
            that it cannot compare.
    """
    scale, overrides = selection.get("scale", "small"), selection.get("overrides", {})
    seeds, methods = selection.get("seeds", ()), selection.get("methods", ())
    check_scale(item.recipe.name, scale, item.recipe.scales)
    cells = item.cells(scale)
    cells = tuple(_of_methods(item, cells, methods)) if methods else cells
    for name in overrides:
        section, _, field = name.partition(".")
        if name in field_names() and len({getattr(getattr(cell.config, section), field) for cell in cells}) > 1:
            raise ConfigError(f"{item.recipe.name} compares several values of {name}; it cannot be set to one value")
    overridden = tuple(dataclasses.replace(cell, config=override(cell.config, overrides)) for cell in cells)
    runs = configs(overridden)
    if seeds:
        runs = tuple(dict.fromkeys(override(run, {"train.seed": str(seed)}) for seed in seeds for run in runs))
    return SelectedItem(item=item, cells=overridden, runs=runs)


def _of_methods(item: Item, cells: Sequence[Cell], methods: Sequence[str]) -> Iterator[Cell]:
    """Yields the cells of these methods. A method that the paper does not have gets those of ALiBi, labeled with its name."""
    of_paper = {str(cell.config.model.method) for cell in cells}
    if len(of_paper) < 2:
        raise ConfigError(
            f"{item.recipe.name} does not compare position methods; omit --methods, or pass it to figure-1"
        )
    if _COMPARED not in methods:
        raise ConfigError(
            f"{item.recipe.name} compares methods with ALiBi; pass --methods {','.join((_COMPARED, *methods))}"
        )
    names = [method.rpartition(":")[2] for method in methods]
    if len(set(names)) < len(names):
        raise ConfigError(f"--methods has two methods of one name: {', '.join(methods)}; rename one")
    for name, method in zip(names, methods, strict=True):
        for cell in cells:
            if cell.config.model.method == (method if method in of_paper else _COMPARED):
                label = cell.label if method in of_paper else cell.label.replace("ALiBi", name)
                config = override(cell.config, {"model.method": method})
                yield dataclasses.replace(cell, label=label, config=config)
