"""The command `alibi`: every command is a function, loads what it needs when it runs, and ends with a plain exit code.

    0 done    1 failed, with one sentence that says why    2 wrong usage    130 interrupted

Only numpy, typer and rich are loaded before a command runs. Next: `lab.py`, the commands that train and test, and
`recipes/index.py`, what can be run.
"""

from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn import records
from alibi_attn.cli import bench, embed, export, heads, lab
from alibi_attn.cli.console import check_writable, fail, interrupted, is_ours, needs, sentence
from alibi_attn.recipes.index import RECIPES
from alibi_attn.slopes import alibi_slopes

app = typer.Typer(
    name="alibi",
    help="Attention with linear biases: see it, run it, and ask of your own text: train short, test long?\n\n"
    "New here? [bold]alibi run[/] answers that question on this machine in a few minutes and writes a report.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.command(epilog=f"Recipes: {', '.join(RECIPES)}.")(lab.run)
app.command("recipes")(lab.list_recipes)
app.command("eval")(lab.evaluation)
app.command()(lab.generate)
app.command()(export.export)
app.command()(embed.embed)
app.command()(heads.heads)


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        if not isinstance(error, OSError) and not is_ours(error):
            raise
        fail(sentence(error))
    except KeyboardInterrupt:
        interrupted()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"alibi-attn {metadata.version('alibi-attn')}")
        raise typer.Exit


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
    check_writable(out)
    found = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no records (.json) inside; alibi run and alibi bench write them"
        )
    lab.write_report(found, out, title=title)


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
    ranks: Annotated[
        int | None, typer.Option(help="Say what so many ranks of context parallelism would send instead.", min=1)
    ] = None,
    score_bound: Annotated[
        float, typer.Option(help="With --ranks: no scaled score is larger, as QK-norm knows it.", min=0)
    ] = 5.0,
) -> None:
    """Say which backends would run an attention of this shape, and what they would skip, on random q, k and v.

    [dim]alibi explain --heads 16 --kv-heads 4 --head-dim 128 --length 8192 --dtype bfloat16[/]

    [dim]alibi explain --length 131072 --ranks 8[/]    which rows ranks would send one another, for a bound on the scores
    """
    with needs("torch"):
        import torch

        from alibi_attn.attention import api
        from alibi_attn.distributed import halos
    if ranks is not None:
        halo = halos.static_halo(
            halos.even_lengths(length, ranks), alibi_slopes(num_heads), score_bound=score_bound, causal=causal, window=window,
            tolerance=tolerance, num_kv_heads=num_kv_heads, head_dim=head_dim, batch=batch, dtype=dtype,
        )  # fmt: skip
        print(
            f"{halo}\nfor scores of at most ±{score_bound:g} and the published slopes; without such a bound norms decide"
        )
        return
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
