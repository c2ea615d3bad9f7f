"""The command `alibi`. Each command is a function that imports what it needs when it runs and ends with an exit code:

    0 done    1 failed, with a one-sentence error    2 wrong usage    130 interrupted

Only numpy, typer and rich are imported before a command runs. Next: `lab.py`, the commands that train and test, and
`recipes/index.py`, the recipes that they run.
"""

import math
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn import records
from alibi_attn.cli import bench, embed, eval_text, export, heads, lab, listings
from alibi_attn.cli.console import (
    check_writable,
    error_in_method,
    fail,
    foreign_exit,
    interrupted,
    is_ours,
    needs,
    sentence,
)
from alibi_attn.recipes.index import RECIPES
from alibi_attn.slopes import alibi_slopes

_EXPECTED = (ValueError, TypeError, ImportError, NotImplementedError)  # what this package raises, besides OSError

app = typer.Typer(
    name="alibi",
    help="Attention with linear biases (ALiBi): inspect it, benchmark it, train short and test long, embed texts.\n\n"
    "New here? [bold]alibi run[/] trains four position methods in a few minutes and writes a report.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.command(epilog=f"Recipes: {', '.join(RECIPES)}. `alibi config` lists the fields of --set.")(lab.run)
app.command("recipes")(listings.list_recipes)
app.command("config")(listings.show_config)
app.command("eval")(lab.evaluation)
app.command("eval-text")(eval_text.eval_text)
app.command()(lab.generate)
app.command()(export.export)
app.command()(embed.embed)
app.command()(heads.heads)


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except Exception as error:
        if (theirs := error_in_method(error)) is not None:
            fail(theirs)
        if not isinstance(error, OSError) and not (isinstance(error, _EXPECTED) and is_ours(error)):
            raise
        fail(sentence(error))
    except KeyboardInterrupt:
        interrupted()
    except SystemExit as error:
        if (theirs := foreign_exit(error)) is not None:
            fail(theirs)
        raise


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"alibi-attn {metadata.version('alibi-attn')}")
        raise typer.Exit


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Record files (.json), or folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Train short, test long",
    verdicts: Annotated[
        bool,
        typer.Option(
            "--verdicts", help="Print the paper's claims, contradicted, confirmed or open, instead of a page."
        ),
    ] = False,
) -> None:
    """Write one self-contained HTML page with figures, tables and conclusions from records.

    [dim]alibi report runs/quick --out quick.html[/]

    [dim]alibi report runs/first runs/second[/]    several runs on one page

    [dim]alibi report runs/paper --verdicts[/]    one line per claim of the paper, with the reason
    """
    if not verdicts:
        check_writable(out)
    loaded = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not loaded:
        raise ValueError(
            f"there are no records (.json) in {', '.join(map(str, paths))}; write some with alibi run or alibi bench"
        )
    if verdicts:
        lab.print_verdicts(loaded)
    else:
        lab.write_report(loaded, out, title=title)


@app.command()
def explain(
    num_heads: Annotated[int, typer.Option("--heads", help="Number of query heads.", min=1)] = 8,
    num_kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Number of key/value heads.", min=1, show_default="same as --heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Size of each head.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Number of queries and keys.", min=1)] = 4096,
    batch: Annotated[int, typer.Option(help="Number of sequences.", min=1)] = 1,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"], typer.Option(help="Dtype of q, k and v.")
    ] = "float32",
    device: Annotated[str, typer.Option(help='A torch device: "cpu", "cuda" or "cuda:1".')] = "cpu",
    causal: Annotated[
        bool, typer.Option("--causal/--symmetric", help="Whether queries see only earlier keys, or all.")
    ] = True,
    window: Annotated[int | None, typer.Option(help="Number of keys that a query sees, its own included.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Softmax mass that may be skipped.", show_default="by dtype")
    ] = None,
    backend: Annotated[str, typer.Option(help='A backend\'s name, or "auto".')] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random q, k and v.")] = 0,
    ranks: Annotated[
        int | None, typer.Option(help="Show instead what this many context-parallel ranks would send.", min=1)
    ] = None,
    score_bound: Annotated[
        float,
        typer.Option(help="With --ranks: largest absolute value of a scaled score, for example from QK-norm.", min=0),
    ] = 5.0,
) -> None:
    """Show which backends can run attention of this shape, and what they would skip, on random q, k and v.

    [dim]alibi explain --heads 16 --kv-heads 4 --head-dim 128 --length 8192 --dtype bfloat16[/]

    [dim]alibi explain --length 131072 --ranks 8[/]    the rows of keys and values that 8 ranks would exchange
    """
    with needs("torch"):
        import torch

        from alibi_attn.attention import api
        from alibi_attn.distributed import halos
        from alibi_attn.nn.device import checked_device
    if ranks is not None:
        halo = halos.static_halo(
            halos.even_lengths(length, ranks), alibi_slopes(num_heads), score_bound=score_bound, causal=causal, window=window,
            tolerance=tolerance, num_kv_heads=num_kv_heads, head_dim=head_dim, batch=batch, dtype=dtype,
        )  # fmt: skip
        print(
            f"{halo}\nassuming the published slopes and scores of at most ±{score_bound:g}; "
            "without such a bound, the norms of q and k decide"
        )
        return
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, count, length, head_dim) for count in (num_heads, num_kv_heads or num_heads, num_kv_heads or num_heads)
    ]
    place = checked_device(device)
    try:
        query, key, value = (
            torch.randn(shape, generator=generator).to(device=place, dtype=getattr(torch, dtype)) for shape in shapes
        )
    except (RuntimeError, TypeError):  # out of memory, or sizes beyond int64
        numbers = sum(map(math.prod, shapes))
        raise ValueError(
            f"q, k and v of --length {length} and --batch {batch} have {numbers:.3g} elements, which do not fit into "
            "memory; pass a smaller --length, --batch, --heads or --head-dim"
        ) from None
    print(api.explain(query, key, value, causal=causal, window=window, tolerance=tolerance, backend=backend))
