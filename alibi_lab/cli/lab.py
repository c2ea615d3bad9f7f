"""`alibi run`, `recipes`, `eval` and `generate`: the commands that train, test and use the lab's models."""

import codecs
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from alibi_attn.cli.cluster import Ray, cluster
from alibi_attn.cli.console import check_writable, console, errors, interrupted, needs, print_path
from alibi_lab import records
from alibi_lab.cli import checkpoints, listings
from alibi_lab.lab.config import ConfigError, EvalConfig, Scale
from alibi_lab.lab.config_io import override, to_json
from alibi_lab.recipes import index
from alibi_lab.recipes.index import RECIPES
from alibi_lab.report import answers, verdicts
from alibi_lab.report.series import studies
from alibi_lab.report.tables import study as tables
from alibi_lab.report.tables.verdicts import counted, ratio_text, why

PAPER_FOLDER = Path("runs/paper")  # the items of the paper share trainings, so they share a folder

Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", help="A text, JSON, JSON Lines, CSV, TSV or Parquet file, or a folder; can be repeated."),
]
TextField = Annotated[
    str, typer.Option(help="Field of the text in JSON, JSON Lines, CSV, TSV and Parquet files.", show_default="text")
]


def run(
    recipe: Annotated[str, typer.Argument(help="The experiment to run, from the list below.")] = "quick",
    scale: Annotated[
        Scale,
        typer.Option(help="smoke: seconds. small: minutes. medium: hours. paper: the published size, for a cluster."),
    ] = "small",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for records, checkpoints and the report.",
            show_default="runs/RECIPE; runs/paper for items of the paper",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the config; can be repeated."),
    ] = None,
    text: Texts = None,
    text_field: TextField = "",
    corpus: Annotated[
        str | None, typer.Option(help='Corpus to train on: "python-source", "hub:NAME" or "task:NAME".')
    ] = None,
    seeds: Annotated[str, typer.Option(help="Repeat every training with these seeds, as in 0,1,2.")] = "",
    methods: Annotated[
        str, typer.Option(help="Position methods to compare, built in or your own: alibi,rotary,mine.py:MyBias.")
    ] = "",
    shard: Annotated[
        str, typer.Option(help="Split the trainings over machines: train only part i of n, as in 0/8 … 7/8.")
    ] = "0/1",
    ray: Ray = None,
    jobs: Annotated[str | None, typer.Option("--jobs", hidden=True)] = None,
    report: Annotated[bool, typer.Option(help="Write a report (OUT/report.html).")] = True,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="First list what is not recorded, with an estimate of its time here."),
    ] = False,
    track: Annotated[
        Literal["", "tensorboard", "wandb"],
        typer.Option(
            help="Also log the losses to TensorBoard or Weights & Biases.",
            show_default="none",
            metavar="tensorboard|wandb",
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only list everything that would run, with an estimate of its time here."),
    ] = False,
) -> None:
    """Train models on short sequences, test them on long ones, and write a report.

    Finished trainings in the folder are skipped and interrupted ones resume, so it is always safe to run a command again.

    [dim]alibi run[/]                                            four methods, five minutes on two cores

    [dim]alibi run quick --text novel.txt --out runs/novel[/]    on your own text

    [dim]alibi run quick --set train.steps=50 --seeds 0,1,2[/]   shorter, with three seeds

    [dim]alibi run quick --methods alibi,mine.py:MyBias[/]       your own position method next to ALiBi

    [dim]alibi run quick --ray local[/]                          one training per processor

    [dim]alibi run figure-4[/]                                   one figure or table of the paper; "paper" runs all
    """
    if jobs is not None:
        raise typer.BadParameter(
            f"--jobs is gone; pass --ray local, or run {jobs} shells with --shard 0/{jobs}, 1/{jobs} and so on"
        )
    listings.recipe_named(recipe)
    overrides = _overrides(changes or [], text or [], corpus, text_field)
    if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", seed) for seed in seeds.split(",") if seeds):
        raise typer.BadParameter(
            f"--seeds is {seeds[:99]!r}; pass integers of at most 18 digits separated by commas, as in 0,1,2"
        )
    chosen, part = [int(seed) for seed in seeds.split(",") if seeds], _shard(shard)
    own: dict[str, Any] = {"methods": [name.strip() for name in methods.split(",")]} if methods else {}
    try:
        index.check(recipe, scale, overrides, chosen, **own)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    items = index.items_of(recipe)
    folder = out or (PAPER_FOLDER if items else Path("runs") / recipe)
    page = folder / (f"{recipe}.html" if items and recipe != "paper" else "report.html")
    asked: dict[str, Any] = {
        "out": folder,
        "scale": scale,
        "overrides": overrides,
        "seeds": chosen,
        "shard": part,
        **own,
    }
    if dry_run:
        listings.show_plan(recipe, **asked)
        return
    check_writable(page)
    architectures = {config.model.architecture for config in RECIPES[recipe].runs(scale)}
    if not items and "mpt" not in (*architectures, overrides.get("model.architecture")):
        console.print("[dim]to export the models for transformers, pass --set model.architecture=mpt[/]")
    with needs("lab"):
        from alibi_lab.lab import experiment
    if missing:
        listings.show_plan(recipe, only_missing=True, **asked)
    try:
        with cluster(ray, show_output=True) if ray else contextlib.nullcontext():
            paths = index.run(recipe, on_ray=ray is not None, track=track, console=console, **asked)
    except KeyboardInterrupt:
        interrupted(f"run the same command again to resume: {records.command()}")
    if not paths or not experiment.processes().is_main_process:
        return
    loaded = [records.load(path) for path in paths]
    if not items:
        print_perplexities(loaded)
    print_path("\nmodels", folder / "checkpoints")
    if items and part[1] > 1:
        console.print("for the results and the report, run the same command without --shard once all shards are done")
    elif report:
        left = 0 if items else experiment.num_runs(RECIPES[recipe], scale, overrides, chosen, **own) - len(paths) // 2
        title = {"title": f"{recipe}: {left} of {left + len(paths) // 2} runs are still missing"} if left else {}
        write_report(loaded, page, **title)


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    numbers = all(re.fullmatch(r"[0-9]{1,18}", one) for one in (index, count))
    if not (numbers and int(index) < int(count)):
        raise typer.BadParameter(f"--shard is {text[:99]!r}; pass i/n, with i from 0 to n − 1, as in 0/8")
    return int(index), int(count)


def evaluation(
    checkpoint: checkpoints.Checkpoint,
    text: Annotated[list[Path], typer.Option("--text", help="A text file or folder; can be repeated.")],
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, in ascending order.")
    ] = "128,256,512,1024,2048",
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = EvalConfig.tokens,
    stride: Annotated[
        int | None, typer.Option(help="Stride of the sliding window.", show_default="a quarter of each length")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(help="Also read in segments, with this many cached tokens before each segment.", min=0),
    ] = None,
    text_field: TextField = "",
    sinks: Annotated[
        int | None,
        typer.Option(help="Also read with this many attention sinks plus a window; each length counts both.", min=0),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="FILE.py:CLASS",
            help="Code of the model's position method, or of additional tests; repeatable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record, which alibi report can draw.")] = None,
) -> None:
    """Test a trained model on a text at several lengths: perplexity on nonoverlapping segments and with a sliding window.

    [dim]alibi eval runs/quick/checkpoints/quick/alibi-128/seed-0-… --text novel.txt --lengths 128,1024[/]

    Two more ways read a continuous stream: cached segments (Transformer-XL), and attention sinks with a window (StreamingLLM).

    [dim]alibi eval CHECKPOINT --text novel.txt --lengths 128,256 --memory 128 --sinks 4[/]

    A position method that is not built in needs its code; a class with a hook "curves" adds a test to any model.

    [dim]alibi eval runs/mine --text novel.txt --method mine.py:MyBias[/]
    """
    with needs("lab"):
        from alibi_lab.lab.data.corpus import load_corpus, whole_text
        from alibi_lab.lab.evaluation.long_context_eval import all_curves, own_curves, why_no_memory, why_no_sinks
        from alibi_lab.lab.model.imported_method import imported_method, source_facts
        from alibi_lab.lab.training.checkpoint import checkpoint_method, load_checkpoint_tokenizer, stored_tokens
    if out is not None:
        check_writable(out / "record")
    checkpoint = checkpoints.find(checkpoint)
    trained = checkpoint_method(checkpoint)
    own = next((one for one in methods or () if one.rpartition(":")[2] == trained.rpartition(":")[2]), None)
    tests = [imported_method(one) for one in methods or () if one != own]
    if missing := [one.__name__ for one in tests if "curves" not in vars(one)]:
        raise typer.BadParameter(
            f"{checkpoint} was trained with {trained}; --method {', '.join(missing)} neither is its class nor has a test (curves)"
        )
    model, config = checkpoints.load(checkpoint, own)
    training_data = config.data
    changes = {
        "data.corpus": "text",
        "data.text": _joined(text),
        "data.text_field": text_field,
        "eval.lengths": lengths,
        "eval.tokens": str(tokens),
        "eval.stride": str(stride),
        "eval.memory": "" if memory is None else str(memory),
        "eval.sinks": "" if sinks is None else str(sinks),
    }
    for value, reason in ((memory, why_no_memory(model)), (sinks, why_no_sinks(model))):
        if value is not None and reason:
            raise typer.BadParameter(reason)
    try:
        config = override(config, changes)
    except ConfigError as error:
        raise typer.BadParameter(checkpoints.with_options(str(error))) from None
    corpus, longest = whole_text(text, load_checkpoint_tokenizer(checkpoint), text_field), config.eval.lengths[-1]
    if len(corpus.valid) < 2 * longest:
        raise ValueError(
            f"--text has {len(corpus.valid)} tokens but --lengths up to {longest} need {2 * longest}: {longest} to score and as "
            "many before them; pass more text or shorter --lengths"
        )
    with errors.status("testing"):
        curves = all_curves(
            model, corpus.valid, config.eval, encode=lambda x: corpus.tokenizer.encode(x).tolist(), say=errors.print
        )
    for test in (type(model.position), *tests):
        if "curves" in vars(test):
            corpus = dataclasses.replace(corpus, train=load_corpus(training_data, stored_tokens(checkpoint)).train)
            found = own_curves(test, model, corpus, config.eval)
            print_curves(found)
            curves |= found
    about: dict[str, records.Json] = {**to_json(config), "corpus": corpus.facts}
    if facts := source_facts(config.model.method):
        about["method"] = facts
    if tests:
        about["tests"] = [source_facts(one) for one in methods or () if one != own]
    name = f"eval/{config.model.method.rpartition(':')[2]}-{config.train.length}/seed-{config.train.seed}"
    metrics = {"parameters": model.num_parameters()}
    record = records.make("evaluation", name, config=about, metrics=metrics, curves=curves)
    print_perplexities([record])
    if out is not None:
        print_path("record", records.save(record, out))


def generate(
    checkpoint: checkpoints.Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Number of tokens to add, even beyond the trained length.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the most likely token; 1 samples from the model's distribution.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from this many most likely tokens.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0,
    method: checkpoints.Method = None,
) -> None:
    """Continue a text with a trained model, token by token with a KV cache.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]
    """
    with needs("lab"):
        from alibi_lab.lab.model import generation
        from alibi_lab.lab.training.checkpoint import load_checkpoint_tokenizer
    checkpoint = checkpoints.find(checkpoint)
    model, _ = checkpoints.load(checkpoint, method)
    tokenizer = load_checkpoint_tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    stream = generation.generate(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    printed = len(tokenizer.decode(ids))
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        print(decoder.decode(text[printed:]), end="", flush=True)
        printed = len(text)
    print(decoder.decode(b"", final=True))


def write_report(loaded: Sequence[records.Record], path: Path, **title: str) -> None:
    """Writes the page and prints its path."""
    with needs("lab"):
        from alibi_lab.report import page
    print_path("report", page.write_report(loaded, path, **title))


def print_verdicts(found: Sequence[records.Record]) -> None:
    """One line per claim of the paper, contradictions first, and the counts at the end."""
    by_identity = {records.identity(one.kind, one.name, one.config): one for one in found}
    judged = verdicts.in_order(verdicts.all_verdicts(list(by_identity.values()), by_identity))
    if not judged:
        raise ValueError(
            "no answer to a figure or table of the paper is among these records; alibi run paper makes them"
        )
    for record, one in judged:
        scale = answers.scale_of(record)
        place = f"{answers.item_name(record)}{f' ({scale})' if scale else ''}"
        bounds = one.interval
        ours = ratio_text(one.ours)
        between = f" [{ratio_text(bounds.low)} to {ratio_text(bounds.high)}]" if bounds else ""
        wanted = f"holds if {one.claim.condition}"
        line = f"{one.word:<12}  {place}: {one.claim.says}: {ours}{between}, {wanted}; {why(one)}"
        console.print(escape(line), soft_wrap=True, highlight=False)
    by_scale: dict[str, list[verdicts.Verdict]] = {}
    for record, one in judged:
        by_scale.setdefault(answers.scale_of(record), []).append(one)
    for scale, group in by_scale.items():
        console.print(escape(f"{f'{scale}: ' if len(by_scale) > 1 else ''}{counted(group)}"))


def _overrides(
    changes: Sequence[str], text: Sequence[Path], corpus: str | None, text_field: str = ""
) -> dict[str, str]:
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
        overrides |= {"data.text": _joined(text), "data.corpus": "text"}
    return overrides


def _joined(text: Sequence[Path]) -> str:
    for path in text:
        if "," in str(path):
            raise typer.BadParameter(f"--text {path} has a comma in its name, but commas separate files; rename it")
    return ",".join(map(str, text))


def print_perplexities(loaded: Sequence[records.Record]) -> None:
    """Prints one table per study."""
    for study in studies(loaded):
        numbers = tables.by_length(study)
        for block in numbers.blocks if numbers else ():
            if not block.title.startswith(f"Perplexity per {study.unit}"):
                continue  # only the report shows the other units
            table = RichTable("", *numbers.columns if numbers else (), box=None)
            for column in table.columns[1:]:
                column.justify = "right"
            for label, _, cells in block.rows:
                table.add_row(label, *(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells))
            console.print(f"\n[bold]{escape(block.title)}[/], by length in {study.unit}s", soft_wrap=True)
            console.print(table)


def print_curves(curves: Mapping[str, Mapping[str, Sequence[records.Json]]]) -> None:
    """Prints one table per curve."""
    for name, columns in curves.items():
        table = RichTable(*columns, title=name, title_justify="left", box=None)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
        console.print(table)
