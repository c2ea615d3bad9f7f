"""The command `alibi`: every command is a function, loads what it needs when it runs, and ends with a plain exit code.

    0 done    1 failed, with one sentence that says why    2 wrong usage    130 interrupted

Only numpy, typer and rich are loaded before a command runs. Next: `recipes/index.py`, what can be run.
"""

import codecs
import contextlib
import difflib
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from alibi_attn import cli_bench, records
from alibi_attn.lab.config import ConfigError, EvalConfig, Scale
from alibi_attn.lab.fields import override, to_json
from alibi_attn.recipes.index import RECIPES
from alibi_attn.report import tables
from alibi_attn.report.series import studies

app = typer.Typer(
    name="alibi",
    help="Attention with linear biases: see it, run it, and ask of your own text: train short, test long?\n\n"
    "New here? [bold]alibi run[/] answers that question on this machine in a few minutes and writes a report.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_bench.app, name="bench")
_console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

Texts = Annotated[list[Path] | None, typer.Option("--text", help="A text file or folder; may be given several times.")]


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        if not isinstance(error, OSError) and not _is_ours(error):
            raise
        _fail(_sentence(error))
    except KeyboardInterrupt:
        _interrupted()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"alibi-attn {metadata.version('alibi-attn')}")
        raise typer.Exit


@app.command(epilog=f"Recipes: {', '.join(RECIPES)}.")
def run(
    recipe: Annotated[str, typer.Argument(help="Which question to ask.")] = "quick",
    scale: Annotated[Scale, typer.Option(help="smoke: seconds. small: one machine. paper: as published.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Folder of this run.", show_default="runs/RECIPE")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field.")] = None,
    text: Texts = None,
    corpus: Annotated[str | None, typer.Option(help='"python-source" or "hub:NAME".')] = None,
    seeds: Annotated[str, typer.Option(help="Repeat every run with these seeds, as in 0,1,2.")] = "",
    report: Annotated[bool, typer.Option(help="Write OUT/report.html.")] = True,
) -> None:
    """Train models short, test them long, and write a report.

    What is recorded in the folder is skipped and what was interrupted is resumed: the same command again is always right.

    [dim]alibi run[/]                                            four methods, five minutes on two cores

    [dim]alibi run quick --text novel.txt --out runs/novel[/]    on your own text

    [dim]alibi run quick --set train.steps=50 --seeds 0,1,2[/]   shorter, with three seeds
    """
    if recipe not in RECIPES:
        raise typer.BadParameter(
            f"there is no recipe {recipe!r}{_nearest(recipe)}; the recipes are: {', '.join(RECIPES)}"
        )
    overrides = _overrides(changes or [], text or [], corpus)
    try:
        for config in RECIPES[recipe].runs(scale):
            override(config, overrides)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if not all(seed.strip().isdecimal() for seed in seeds.split(",") if seeds):
        raise typer.BadParameter(f"--seeds is {seeds!r}; pass whole numbers with commas between, as in 0,1,2")
    folder = out or Path("runs") / recipe
    _check_writable(folder / "report.html")
    with _needs("lab"):
        from accelerate import PartialState

        from alibi_attn.lab import experiment
    try:
        paths = experiment.run(
            RECIPES[recipe],
            scale=scale,
            out=folder,
            overrides=overrides,
            seeds=[int(seed) for seed in seeds.split(",") if seeds],
            console=_console,
        )
    except KeyboardInterrupt:
        _interrupted(f"the same command goes on where it stopped: {records.command()}")
    if PartialState().is_main_process:
        found = [records.load(path) for path in paths]
        _print_perplexities(found)
        _console.print(f"\nmodels  {escape(str(folder / 'checkpoints'))}", soft_wrap=True)
        if report:
            _write_report(found, folder / "report.html")


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Record files, or folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Train short, test long",
) -> None:
    """Write one self-contained HTML page from records: pictures, tables, and what may be concluded.

    [dim]alibi report runs/quick --out quick.html[/]

    [dim]alibi report runs/first runs/second[/]    several runs on one page
    """
    _check_writable(out)
    found = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no records (.json) inside; alibi run and alibi bench write them"
        )
    _write_report(found, out, title=title)


@app.command("eval")
def evaluation(
    checkpoint: Annotated[Path, typer.Argument(help="A folder below OUT/checkpoints.", show_default=False)],
    text: Annotated[list[Path], typer.Option("--text", help="A text file or folder; may be given several times.")],
    lengths: Annotated[str, typer.Option(help="Tokens read at once, rising.")] = "128,256,512,1024,2048",
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = EvalConfig.tokens,
    stride: Annotated[int | None, typer.Option(help="Of the sliding window.", show_default="a quarter")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record; alibi report draws it.")] = None,
) -> None:
    """Test a trained model on a text at several lengths: perplexity, nonoverlapping and with a sliding window.

    [dim]alibi eval runs/quick/checkpoints/quick/alibi-128/seed-0-… --text novel.txt --lengths 128,1024[/]
    """
    with _needs("lab"):
        from alibi_attn.lab.checkpoint import load_checkpoint
        from alibi_attn.lab.data import read_text
        from alibi_attn.lab.evaluate import evaluate
    if out is not None:
        _check_writable(out / "record")
    model, config = load_checkpoint(checkpoint)
    asked = {
        "data.text": _joined(text),
        "eval.lengths": lengths,
        "eval.tokens": str(tokens),
        "eval.stride": str(stride),
    }
    try:
        config = override(config, asked)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    content = read_text(text)
    digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
    with _errors.status("testing"):
        curves = evaluate(model, content, config.eval)
    record = records.make(
        "evaluation",
        f"eval/{config.model.method}-{config.train.length}/seed-{config.train.seed}",
        config={
            **to_json(config),
            "corpus": {"name": "text", "sha256": digest, "valid_tokens": len(content), "bytes_per_token": 1},
        },
        metrics={"parameters": model.num_parameters()},
        curves=curves,
    )
    _print_perplexities([record])
    if out is not None:
        _console.print(f"record  {escape(str(records.save(record, out)))}", soft_wrap=True)


@app.command()
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
    with _needs("lab"):
        from alibi_attn.lab import model as models
        from alibi_attn.lab.checkpoint import load_checkpoint
    model, _ = load_checkpoint(checkpoint)
    stream = models.generate(
        model, prompt.encode(), max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    for token in stream:
        print(decoder.decode(bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))


@app.command()
def heads(
    num_heads: Annotated[int, typer.Option(help="How many heads the model has.", min=1)] = 8,
    png: Annotated[Path | None, typer.Option(help="Also draw the biases into this file.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in the picture.", min=1)] = 1024,
) -> None:
    """Show the heads: slope, half-life, and the distance from which a key's factor is under 1e-6.

    A head multiplies the weight of a key by e^(−m·distance). A large slope m sees only what is near.

    [dim]alibi heads --num-heads 12 --png heads.png[/]
    """
    table = RichTable("head", "slope m", "half-life", "under 1e-6 from", caption="distances in tokens", box=None)
    for column in table.columns:
        column.justify = "right"
    for row in tables.head_rows(num_heads):
        table.add_row(*row)
    if png is not None:
        _check_writable(png)
    _console.print(table)
    if png is not None:
        with _needs("lab"):
            from alibi_attn.report.heads import bias_png
        _console.print(
            f"picture  {escape(str(records.replace_file(png, bias_png(num_heads, seq_len))))}", soft_wrap=True
        )


@app.command()
def explain(
    num_heads: Annotated[int, typer.Option("--heads", help="Query heads.", min=1)] = 8,
    num_kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key/value heads.", show_default="as --heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Queries and keys.", min=1)] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    dtype: Annotated[Literal["float64", "float32", "bfloat16", "float16"], typer.Option()] = "float32",
    device: Annotated[str, typer.Option(help='As in torch: "cpu", "cuda", "cuda:1".')] = "cpu",
    causal: Annotated[bool, typer.Option("--causal/--symmetric", help="May a query look right?")] = True,
    window: Annotated[int | None, typer.Option(help="Keys a query may see, itself included.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Softmax mass that may be skipped.", show_default="by dtype")
    ] = None,
    backend: Annotated[str, typer.Option(help='A backend\'s name, or "auto".')] = "auto",
    seed: Annotated[int, typer.Option(help="Of the random q, k and v.")] = 0,
) -> None:
    """Say which backends would run an attention of this shape, and what they would skip, on random q, k and v.

    [dim]alibi explain --heads 16 --kv-heads 4 --head-dim 128 --length 8192 --dtype bfloat16[/]
    """
    with _needs("torch"):
        import torch

        from alibi_attn.attention import api
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, count, length, head_dim) for count in (num_heads, num_kv_heads or num_heads, num_kv_heads or num_heads)
    ]
    try:
        place = torch.device(device)
        query, key, value = (
            torch.randn(shape, generator=generator).to(device=place, dtype=getattr(torch, dtype)) for shape in shapes
        )
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise ValueError(f"device is {device!r} but it cannot be used here ({str(error).splitlines()[0]})") from None
    print(api.explain(query, key, value, causal=causal, window=window, tolerance=tolerance, backend=backend))


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
        found["data.text"] = _joined(text)
    return found


def _joined(text: Sequence[Path]) -> str:
    for path in text:
        if "," in str(path):
            raise typer.BadParameter(f"--text {path} has a comma in its name, which separates files; rename it")
    return ",".join(map(str, text))


def _print_perplexities(found: Sequence[records.Record]) -> None:
    for study in studies(found):
        numbers = tables.by_length(study)
        for block in numbers.blocks if numbers else ():
            if not block.title.startswith("Perplexity"):
                continue  # the report has the other units
            table = RichTable("", *numbers.columns if numbers else (), box=None)
            for column in table.columns[1:]:
                column.justify = "right"
            for label, _, cells in block.rows:
                table.add_row(label, *(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells))
            _console.print(f"\n[bold]{escape(block.title)}[/], by length in {study.unit}s", soft_wrap=True)
            _console.print(table)


def _write_report(found: Sequence[records.Record], path: Path, **words: str) -> None:
    with _needs("lab"):
        from alibi_attn.report.page import write_report
    _console.print(f"report  {escape(str(write_report(found, path, **words)))}", soft_wrap=True)


def _check_writable(path: Path) -> None:
    """Before any work: can this file be written? Leaves nothing behind."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the name of a file")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise OSError(f"{folder} cannot be written ({reason}); pass a folder that you may write, with --out") from None


@contextlib.contextmanager
def _needs(extra: str) -> Iterator[None]:
    """Names the extra to install where an import inside finds a package missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "alibi_attn":
            raise
        _fail(f'this command needs {error.name.split(".")[0]}; install it with: pip install "alibi-attn[{extra}]"')


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name, RECIPES, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _is_ours(error: Exception) -> bool:
    """Was it raised by a line of this package, on purpose, and not somewhere below?"""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "alibi_attn"


def _fail(sentence: str) -> NoReturn:
    _errors.print(f"[bold red]error:[/] {escape(sentence)}")
    sys.exit(1)


def _interrupted(advice: str = "nothing half-written is left behind") -> NoReturn:
    _errors.print(f"\n[bold]interrupted[/]; {escape(advice)}")
    sys.exit(130)
