"""`alibi recipes`, `alibi config` and `alibi run --dry-run` and `--missing`: what can be run, changed, and what it costs."""

import functools
import operator
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable

from alibi_attn.cli.console import console, needs
from alibi_lab.cli.options import documented, usage_errors
from alibi_lab.lab.config import Recipe, Scale, check_scale, nearest
from alibi_lab.lab.config_io import field_meanings
from alibi_lab.recipes.index import RECIPES

_right = functools.partial(Column, justify="right")
_STATES = {
    (): "recorded already",
    ("evaluation",): "trained already, not tested",
    ("training",): "tested already",
    ("training", "evaluation"): "",
    ("speed",): "measures speed",
}


def show_plan(recipe: str, *, only_missing: bool = False, **options: Any) -> None:
    """Prints what `alibi run` would run; the options are those of `recipes.plan.plan`.

    A launcher's processes all call this, because they measure steps together; the first one prints.
    """
    with needs("lab"):
        from torch import get_num_threads

        from alibi_lab.lab.experiment import processes
        from alibi_lab.recipes.plan import plan
    table = RichTable("training", _right("tokens"), _right("minutes here"), "", box=None)
    planned = plan(recipe, **options)
    if not processes().is_main_process:
        return
    left = [one for one in planned if one.missing]
    for one in left if only_missing else planned:
        minutes = f"{one.seconds / 60:.1f}" if one.missing else ""
        table.add_row(one.title, f"{one.tokens:,}", minutes, _STATES[one.missing])
    if table.row_count:
        console.print(table)
    of_speed = [one for one in planned if one.study == "speed"]
    counts = []
    if len(planned) > len(of_speed):
        trainings = [one for one in left if "training" in one.missing]
        tokens = sum(one.tokens for one in trainings)
        counts.append(f"{len(trainings)} of {len(planned) - len(of_speed)} trainings left, {tokens:,} tokens")
    if of_speed:
        counts.append(f"{sum('speed' in one.missing for one in left)} of {len(of_speed)} measurements of speed left")
    total = sum(one.seconds for one in left) / 60
    counts.append(f"about {total:.0f} minutes here with the tests ({total * get_num_threads():.0f} core-minutes)")
    console.print("; ".join(counts), soft_wrap=True)


@documented
def list_recipes(
    recipe: Annotated[str | None, typer.Argument(show_default=False)] = None, scale: Scale = "small"
) -> None:
    """List the recipes of `alibi run`, with the number of their trainings and tokens; or show one recipe in detail.

    The items of the paper share trainings, so running all of them costs far less than the sum.

    [dim]alibi recipes[/]

    [dim]alibi recipes referee --scale medium[/]

    Args:
        recipe: Show all details of this recipe.
        scale: Scale whose trainings are counted.
    """
    if recipe is not None:
        one = recipe_named(recipe, scale)
        details = {name: getattr(one, name) for name in ("question", "paper", "command", "cost", "expected")}
        details["trainings"] = "{}, {} tokens at scale {}".format(*_size(one, scale), scale)
        for name, value in details.items():
            console.print(f"[bold]{name:<10}[/]{escape(value)}", soft_wrap=True)
        return
    width = max(20, console.width - max(map(len, RECIPES)) - 36)  # the width of the other columns
    question = Column("question", no_wrap=True, overflow="ellipsis", max_width=width)
    sizes = (_right(name, no_wrap=True) for name in ("trainings", "tokens"))
    table = RichTable(Column("recipe", no_wrap=True), question, *sizes, box=None)
    for name, one in RECIPES.items():
        if scale in one.scales:
            table.add_row(name, one.question, *_size(one, scale))
    console.print(table)


@documented
def show_config(recipe: Annotated[str, typer.Argument()] = "quick", scale: Scale = "small") -> None:
    """Show every field of the config with its value in a recipe and its meaning. Change fields with `alibi run --set`.

    [dim]alibi config[/]

    [dim]alibi config referee --scale medium[/]

    Args:
        recipe: The recipe whose values are shown.
        scale: The scale of the recipe.
    """
    configs = recipe_named(recipe, scale).runs(scale)
    table = RichTable(Column("field", no_wrap=True), "value", "meaning", box=None)
    for name, meaning in field_meanings().items():
        values = dict.fromkeys(_plain(operator.attrgetter(name)(config)) for config in configs)
        table.add_row(name, ", ".join(value for value in values if value), meaning)
    console.print(table)


def _plain(value: object) -> str:
    """A value as `--set` accepts it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def recipe_named(name: str, scale: Scale) -> Recipe:
    """The recipe; an unknown name ends the command with a suggestion, and a scale that it does not have with those it has."""
    if name not in RECIPES:
        raise typer.BadParameter(
            f"there is no recipe {name!r}{nearest(name, tuple(RECIPES))}; the recipes are: {', '.join(RECIPES)}"
        )
    with usage_errors():
        check_scale(name, scale, RECIPES[name].scales)
    return RECIPES[name]


def _size(recipe: Recipe, scale: Scale) -> tuple[str, str]:
    """The number of its trainings and of their tokens."""
    trainings = {(run.model, run.data, run.train) for run in recipe.runs(scale)}
    return f"{len(trainings)}", f"{sum(train.steps * train.batch_tokens for _, _, train in trainings):,}"
