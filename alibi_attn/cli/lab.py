"""`alibi run`, `recipes`, `eval` and `generate`: the commands that train, test and use the lab's models."""

import codecs
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from alibi_attn import records
from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs
from alibi_attn.lab.config import ConfigError, EvalConfig, Scale
from alibi_attn.lab.fields import override, to_json
from alibi_attn.recipes.index import ITEMS, RECIPES
from alibi_attn.recipes.paper.cells import Item, ask
from alibi_attn.report import tables
from alibi_attn.report.series import studies

PAPER_FOLDER = Path("runs/paper")  # items share trainings, and so a folder

Texts = Annotated[list[Path] | None, typer.Option("--text", help="A text file or folder; may be given several times.")]


def run(
    recipe: Annotated[str, typer.Argument(help="Which question to ask.")] = "quick",
    scale: Annotated[
        Scale, typer.Option(help="smoke: seconds. small: minutes. medium: hours. paper: as published, a cluster.")
    ] = "small",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of this run.", show_default="runs/RECIPE, for items of the paper runs/paper"),
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field.")] = None,
    text: Texts = None,
    corpus: Annotated[str | None, typer.Option(help='"python-source" or "hub:NAME".')] = None,
    seeds: Annotated[str, typer.Option(help="Repeat every run with these seeds, as in 0,1,2.")] = "",
    shard: Annotated[
        str, typer.Option(help="Train only this part of the runs, as in 0/8 … 7/8, on one of several machines.")
    ] = "0/1",
    jobs: Annotated[
        int, typer.Option(help="Trainings at the same time, a process each, which share the processor.", min=1)
    ] = 1,
    report: Annotated[bool, typer.Option(help="Write OUT/report.html.")] = True,
    track: Annotated[bool, typer.Option("--track", help="Also show the losses in TensorBoard.")] = False,
) -> None:
    """Train models short, test them long, and write a report.

    What is recorded in the folder is skipped and what was interrupted is resumed: the same command again is always right.

    [dim]alibi run[/]                                            four methods, five minutes on two cores

    [dim]alibi run quick --text novel.txt --out runs/novel[/]    on your own text

    [dim]alibi run quick --set train.steps=50 --seeds 0,1,2[/]   shorter, with three seeds

    [dim]alibi run quick --jobs 4[/]                             all four trainings at the same time

    [dim]alibi run figure-4[/]                                   a figure or table of the paper; all of them: paper
    """
    if recipe not in RECIPES:
        raise typer.BadParameter(
            f"there is no recipe {recipe!r}{_nearest(recipe)}; the recipes are: {', '.join(RECIPES)}"
        )
    items = list(ITEMS.values()) if recipe == "paper" else [ITEMS[recipe]] if recipe in ITEMS else []
    overrides = _overrides(changes or [], text or [], corpus)
    if not all(seed.strip().isdecimal() for seed in seeds.split(",") if seeds):
        raise typer.BadParameter(f"--seeds is {seeds!r}; pass whole numbers with commas between, as in 0,1,2")
    chosen, part = [int(seed) for seed in seeds.split(",") if seeds], _shard(shard)
    try:
        for item in items:
            ask(item, scale, overrides, chosen)
        for config in () if items else RECIPES[recipe].runs(scale):
            override(config, overrides)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    folder = out or (PAPER_FOLDER if items else Path("runs") / recipe)
    page = folder / (f"{recipe}.html" if recipe in ITEMS else "report.html")
    check_writable(page)
    paths = _run(recipe, items, folder, scale, overrides, chosen, part, jobs, track)
    if paths:
        found = [records.load(path) for path in paths]
        if not items:
            print_perplexities(found)
        console.print(f"\nmodels  {escape(str(folder / 'checkpoints'))}", soft_wrap=True)
        if items and part[1] > 1:
            console.print("answers and the page: the same command without --shard, once all shards have run")
        elif report:
            write_report(found, page, **_missing(recipe, scale, overrides, chosen, len(paths) // 2))


def _run(
    recipe: str,
    items: Sequence[Item],
    folder: Path,
    scale: Scale,
    overrides: Mapping[str, str],
    seeds: Sequence[int],
    shard: tuple[int, int],
    jobs: int,
    track: bool,
) -> list[Path]:
    """The records' paths; none in a process that only helps another one."""
    with needs("lab"):
        from alibi_attn.lab import experiment
        from alibi_attn.recipes.paper.run_items import run_items
    try:
        run: Callable[..., list[Path]] = (
            functools.partial(run_items, items) if items else functools.partial(experiment.run, RECIPES[recipe])
        )
        paths = run(
            scale=scale,
            out=folder,
            overrides=overrides,
            seeds=seeds,
            shard=shard,
            jobs=jobs,
            console=console,
            track=track,
        )
    except KeyboardInterrupt:
        interrupted(f"the same command goes on where it stopped: {records.command()}")
    return paths if experiment.processes().is_main_process else []


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise typer.BadParameter(f"--shard is {text!r}; pass i/n, with i from 0 to n − 1, as in 0/8")
    return int(index), int(count)


def _missing(
    recipe: str, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int], recorded: int
) -> dict[str, str]:
    """What the page's title says of runs that other shards have not recorded yet."""
    from alibi_attn.lab import experiment

    if recipe in ITEMS or recipe == "paper":
        return {}
    runs = experiment.num_runs(RECIPES[recipe], scale, overrides, seeds)
    return {} if recorded == runs else {"title": f"{recipe}: {runs - recorded} of {runs} runs are still missing"}


def list_recipes(
    scale: Annotated[Scale, typer.Option(help="Whose trainings are counted.")] = "small",
) -> None:
    """List what `alibi run` can run: the question, where the paper asks it, how many trainings it takes.

    Items of the paper share trainings: together they take far fewer than the sum.

    [dim]alibi recipes[/]

    [dim]alibi recipes --scale paper[/]
    """
    table = RichTable("recipe", "question", "paper", "trainings", "tokens", box=None)
    table.columns[3].justify = table.columns[4].justify = "right"
    for name, recipe in RECIPES.items():
        trainings = {(run.model, run.data, run.train) for run in recipe.runs(scale)}
        tokens = sum(train.steps * train.batch_tokens for _, _, train in trainings)
        table.add_row(name, recipe.question, recipe.paper, f"{len(trainings)}", f"{tokens:,}")
    console.print(table)


def evaluation(
    checkpoint: Annotated[Path, typer.Argument(help="A folder below OUT/checkpoints.", show_default=False)],
    text: Annotated[list[Path], typer.Option("--text", help="A text file or folder; may be given several times.")],
    lengths: Annotated[str, typer.Option(help="Tokens read at once, rising.")] = "128,256,512,1024,2048",
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = EvalConfig.tokens,
    stride: Annotated[int | None, typer.Option(help="Of the sliding window.", show_default="a quarter")] = None,
    memory: Annotated[
        int | None,
        typer.Option(help="Also in segments of each length with the keys of so many tokens before it.", min=0),
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="Also with so many first tokens beside a window, each length in all.", min=0)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record; alibi report draws it.")] = None,
) -> None:
    """Test a trained model on a text at several lengths: perplexity, nonoverlapping and with a sliding window.

    [dim]alibi eval runs/quick/checkpoints/quick/alibi-128/seed-0-… --text novel.txt --lengths 128,1024[/]

    Two more ways to read on and on: cached segments, as Transformer-XL reads, and attention sinks with a window (StreamingLLM).

    [dim]alibi eval CHECKPOINT --text novel.txt --lengths 128,256 --memory 128 --sinks 4[/]
    """
    with needs("lab"):
        from alibi_attn.lab.checkpoint import load_checkpoint, load_checkpoint_tokenizer
        from alibi_attn.lab.data import whole_text
        from alibi_attn.lab.streams import all_curves, why_no_memory, why_no_sinks
    if out is not None:
        check_writable(out / "record")
    model, config = load_checkpoint(checkpoint)
    asked = {
        "data.corpus": "text",
        "data.text": _joined(text),
        "eval.lengths": lengths,
        "eval.tokens": str(tokens),
        "eval.stride": str(stride),
        "eval.memory": "" if memory is None else str(memory),
        "eval.sinks": "" if sinks is None else str(sinks),
    }
    for given, why in ((memory, why_no_memory(model)), (sinks, why_no_sinks(model))):
        if given is not None and why:
            raise typer.BadParameter(why)
    try:
        config = override(config, asked)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    corpus = whole_text(text, load_checkpoint_tokenizer(checkpoint))
    with errors.status("testing"):
        curves = all_curves(
            model,
            corpus.valid,
            config.eval,
            encode=lambda text: corpus.tokenizer.encode(text).tolist(),
            say=errors.print,
        )
    record = records.make(
        "evaluation",
        f"eval/{config.model.method}-{config.train.length}/seed-{config.train.seed}",
        config={**to_json(config), "corpus": corpus.facts},
        metrics={"parameters": model.num_parameters()},
        curves=curves,
    )
    print_perplexities([record])
    if out is not None:
        console.print(f"record  {escape(str(records.save(record, out)))}", soft_wrap=True)


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder below OUT/checkpoints.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="How the text begins.")],
    max_new_tokens: Annotated[
        int, typer.Option(help="How many tokens to add; may go beyond the trained length.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token, 1 samples what the model says.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the likeliest only.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Let a trained model continue a text, one token at a time, with cached keys.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]
    """
    with needs("lab"):
        from alibi_attn.lab import model as models
        from alibi_attn.lab.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    model, _ = load_checkpoint(checkpoint)
    tokenizer = load_checkpoint_tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    stream = models.generate(model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    shown = len(tokenizer.decode(ids))
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        print(decoder.decode(text[shown:]), end="", flush=True)
        shown = len(text)
    print(decoder.decode(b"", final=True))


def write_report(found: Sequence[records.Record], path: Path, **words: str) -> None:
    """Write the page and say where it is."""
    with needs("lab"):
        from alibi_attn.report import page
    console.print(f"report  {escape(str(page.write_report(found, path, **words)))}", soft_wrap=True)


def _overrides(changes: Sequence[str], text: Sequence[Path], corpus: str | None) -> dict[str, str]:
    found = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {change} has no value; write it as in --set train.steps=50")
        found[name.strip()] = value.strip()
    if corpus is not None:
        found["data.corpus"] = corpus
    if text:
        found |= {"data.corpus": "text", "data.text": _joined(text)} if corpus is None else {"data.text": _joined(text)}
    return found


def _joined(text: Sequence[Path]) -> str:
    for path in text:
        if "," in str(path):
            raise typer.BadParameter(f"--text {path} has a comma in its name, which separates files; rename it")
    return ",".join(map(str, text))


def print_perplexities(found: Sequence[records.Record]) -> None:
    """A table on the console for every study."""
    for study in studies(found):
        numbers = tables.by_length(study)
        for block in numbers.blocks if numbers else ():
            if not block.title.startswith(f"Perplexity per {study.unit}"):
                continue  # the report has the other units
            table = RichTable("", *numbers.columns if numbers else (), box=None)
            for column in table.columns[1:]:
                column.justify = "right"
            for label, _, cells in block.rows:
                table.add_row(label, *(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells))
            console.print(f"\n[bold]{escape(block.title)}[/], by length in {study.unit}s", soft_wrap=True)
            console.print(table)


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name, RECIPES, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
