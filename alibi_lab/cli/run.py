"""`alibi run` trains, tests and reports the runs of a recipe; `alibi recipes` and `alibi config` list what it can run."""

import contextlib
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Column

from alibi_attn.cli.cluster import Ray, cluster
from alibi_attn.cli.console import check_writable, console, interrupted, needs, print_path
from alibi_lab import provenance, records
from alibi_lab.cli.options import TextField, documented, joined, usage_errors
from alibi_lab.cli.report import print_perplexities, print_table, right, write_report
from alibi_lab.lab.config import Recipe, Scale, Selection, check_scale, nearest
from alibi_lab.lab.config_io import field_meanings
from alibi_lab.recipes import index
from alibi_lab.recipes.index import RECIPES

PAPER_FOLDER = Path("runs/paper")  # the items of the paper share trainings, so they share a folder

Track = Literal["", "tensorboard", "wandb"]

_STATES = {
    (): "recorded already",
    ("evaluation",): "trained already, not tested",
    ("training",): "tested already",
    ("training", "evaluation"): "",
    ("speed",): "measures speed",
}


@documented
def run(
    recipe: Annotated[str, typer.Argument()] = "quick",
    scale: Scale = "small",
    out: Annotated[Path | None, typer.Option(show_default="runs/RECIPE; runs/paper for items of the paper")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE")] = None,
    text: list[Path] | None = None,
    text_field: TextField = "",
    corpus: str | None = None,
    seeds: str = "",
    methods: str = "",
    minutes: Annotated[float | None, typer.Option(min=0.01, show_default="the scale's steps")] = None,
    shard: str = "0/1",
    ray: Ray = None,
    report: bool = True,
    missing: bool = False,
    track: Annotated[Track, typer.Option(show_default="none", metavar="tensorboard|wandb")] = "",
    dry_run: bool = False,
) -> None:
    """Train models on short sequences, test them on long ones, and write a report.

    Finished trainings in the folder are skipped and interrupted ones resume, so it is always safe to run a command again.

    [dim]alibi run[/]                                            four methods, five minutes on two cores

    [dim]alibi run quick --text novel.txt --out runs/novel[/]    on your own text

    [dim]alibi run quick --set train.steps=50 --seeds 0,1,2[/]   shorter, with three seeds

    [dim]alibi run quick --methods alibi,mine.py:MyBias[/]       your own position method next to ALiBi

    [dim]alibi run quick --ray local[/]                          one training per processor

    [dim]alibi run figure-4[/]                                   one figure or table of the paper; "paper" runs all

    Args:
        recipe: The experiment to run, from the list below.
        scale: smoke: seconds. small: minutes. medium: hours. gpu: ten minutes per training on one H100 (figure-1, table-2).
            paper: the published size, for a cluster.
        out: Folder for records, checkpoints and the report.
        changes: Change a field of the config; can be repeated.
        text: A text, JSON, JSON Lines, CSV, TSV or Parquet file, or a folder; can be repeated.
        corpus: Corpus to train on: "python-source", "hub:NAME" or "task:NAME".
        seeds: Repeat every training with these seeds, as in 0,1,2.
        methods: Position methods to compare, built in or your own: alibi,rotary,mine.py:MyBias.
        minutes: Train every model for about this long here, all with the same number of steps.
        shard: Split the trainings over machines: train only part i of n, as in 0/8 … 7/8.
        report: Write a report (OUT/report.html).
        missing: First list what is not recorded, with an estimate of its time here.
        track: Also log the losses to TensorBoard or Weights & Biases.
        dry_run: Only list everything that would run, with an estimate of its time here.
    """
    recipe_named(recipe, scale)
    overrides = _overrides(changes or [], text or [], corpus, text_field)
    selection = _selection(scale, overrides, seeds, methods)
    part = _shard(shard)
    with usage_errors():
        index.check(recipe, **selection)
    if scale == "gpu" and not ray:
        _check_gpu()
    if minutes is not None:
        selection = _shortened(recipe, minutes, selection, alone=not ray and part == (0, 1))
    items = index.items_of(recipe)
    folder = out or (PAPER_FOLDER if items else Path("runs") / recipe)
    page = folder / (f"{recipe}.html" if items and recipe != "paper" else "report.html")
    options: dict[str, Any] = {"out": folder, "shard": part, **selection}
    if dry_run:
        show_plan(recipe, **options)
        return
    check_writable(page)
    if missing:
        show_plan(recipe, only_missing=True, **options)
    with needs("lab"):
        from alibi_lab.lab import experiment
    try:
        with cluster(ray, show_output=True) if ray else contextlib.nullcontext():
            paths = index.run(recipe, on_ray=ray is not None, track=track, console=console, **options)
    except KeyboardInterrupt:
        interrupted(f"run the same command again to resume: {provenance.command()}")
    if paths and experiment.processes().is_main_process:
        _finish(recipe, paths, folder, page if report else None, part, selection)


def _finish(
    recipe: str, paths: Sequence[Path], folder: Path, page: Path | None, shard: tuple[int, int], selection: Selection
) -> None:
    """Prints the results, and writes the report if it has a page."""
    from alibi_lab.lab.planning import configs_of

    items, loaded = index.items_of(recipe), [records.load(path) for path in paths]
    if not items:
        print_perplexities(loaded)
    print_path("\nmodels", folder / "checkpoints")
    architectures = {config.model.architecture for config in RECIPES[recipe].runs(selection["scale"])}
    if not items and "mpt" not in (*architectures, selection["overrides"].get("model.architecture")):
        console.print("[dim]to export the models for transformers, pass --set model.architecture=mpt[/]")
    if items and shard[1] > 1:
        console.print("for the results and the report, run the same command without --shard once all shards are done")
    elif page:
        left = 0 if items else len(configs_of(RECIPES[recipe], **selection)) - len(paths) // 2
        title = {"title": f"{recipe}: {left} of {left + len(paths) // 2} runs are still missing"} if left else {}
        write_report(loaded, page, **title)


def _selection(scale: Scale, overrides: dict[str, str], seeds: str, methods: str) -> Selection:
    if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", seed) for seed in seeds.split(",") if seeds):
        allowed = "integers of at most 18 digits separated by commas, as in 0,1,2"
        raise typer.BadParameter(f"--seeds is {seeds[:99]!r}; pass {allowed}")
    chosen = [int(seed) for seed in seeds.split(",") if seeds]
    named = [name.strip() for name in methods.split(",") if methods]
    return Selection(scale=scale, overrides=overrides, seeds=chosen, methods=named)


def _check_gpu() -> None:
    with needs("lab"):
        import torch
    if not torch.cuda.is_available():
        raise typer.BadParameter(
            "--scale gpu is planned for a GPU with bf16 matrix products, and torch finds no CUDA device here, where a training "
            "would take days; pass --scale medium"
        )


def _shortened(recipe: str, minutes: float, selection: Selection, *, alone: bool) -> Selection:
    """The selection with the steps that fit into these minutes, which are printed: another measurement gives others."""
    with needs("lab"):
        from alibi_lab.lab.experiment import processes
        from alibi_lab.recipes.plan import shortened_to
    overrides = selection["overrides"]
    if not alone or processes().num_processes > 1 or "train.steps" in overrides:
        raise typer.BadParameter(
            "--minutes measures the steps of one process; with --ray, --shard, a launcher or --set train.steps omit it, and "
            "pass --set train.steps=N"
        )
    changes = shortened_to(minutes, recipe, **selection)
    fields = " ".join(f"--set {name}={value}" for name, value in changes.items())
    console.print(f"{minutes:g} min per training: {fields}; pass these instead of --minutes to resume", soft_wrap=True)
    shorter = Selection(**{**selection, "overrides": {**overrides, **changes}})
    with usage_errors():
        index.check(recipe, **shorter)
    return shorter


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18})/([0-9]{1,18})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"--shard is {text[:99]!r}; pass i/n, with i from 0 to n − 1, as in 0/8")
    return int(match[1]), int(match[2])


def _overrides(changes: Sequence[str], text: Sequence[Path], corpus: str | None, text_field: str) -> dict[str, str]:
    overrides = {"data.text_field": text_field} if text_field else {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {change} has no value; pass FIELD=VALUE, as in --set train.steps=50")
        overrides[name.strip()] = value.strip()
    if corpus is not None and text:
        raise typer.BadParameter(f"--text and --corpus {corpus} are two texts to train on; pass one of them")
    if corpus is not None:
        overrides["data.corpus"] = corpus
    if text:
        overrides |= {"data.text": joined(text), "data.corpus": "text"}
    return overrides


def show_plan(recipe: str, *, only_missing: bool = False, **options: Any) -> None:
    """Prints what `alibi run` would run; the options are those of `recipes.plan.plan`.

    A launcher's processes all call this, because they measure steps together; the first one prints.
    """
    with needs("lab"):
        from torch import get_num_threads

        from alibi_lab.lab.experiment import processes
        from alibi_lab.recipes.plan import plan
    planned = plan(recipe, **options)
    if not processes().is_main_process:
        return
    left = [one for one in planned if one.missing]
    rows = (
        (one.title, f"{one.tokens:,}", f"{one.seconds / 60:.1f}" if one.missing else "", _STATES[one.missing])
        for one in (left if only_missing else planned)
    )
    print_table(("training", right("tokens"), right("minutes here"), ""), rows)
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
    sizes = (right(name, no_wrap=True) for name in ("trainings", "tokens"))
    rows = ((name, one.question, *_size(one, scale)) for name, one in RECIPES.items() if scale in one.scales)
    print_table((Column("recipe", no_wrap=True), question, *sizes), rows)


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
    rows = list[tuple[str, str, str]]()
    for name, meaning in field_meanings().items():
        values = dict.fromkeys(_plain(operator.attrgetter(name)(config)) for config in configs)
        rows.append((name, ", ".join(value for value in values if value), meaning))
    print_table((Column("field", no_wrap=True), "value", "meaning"), rows)


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
