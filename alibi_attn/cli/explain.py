"""`alibi explain`: which backends can run attention of a shape, and what they would skip."""

import math
from typing import Annotated, Literal

import typer

from alibi_attn.cli.console import needs
from alibi_attn.slopes import alibi_slopes

MOST_HEADS, MOST_TOKENS = 4096, 10**12
MOST_ROWS = 2**22  # entries of a table of rows per pair of ranks and head; some seconds
MOST_SEED = 2**63 - 1  # of torch's generators


def explain(
    num_heads: Annotated[int, typer.Option("--heads", help="Number of query heads.", min=1, max=MOST_HEADS)] = 8,
    num_kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Number of key/value heads.", min=1, show_default="same as --heads")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Size of each head.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Number of queries and keys.", min=1, max=MOST_TOKENS)] = 4096,
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
    seed: Annotated[int, typer.Option(help="Seed of the random q, k and v.", min=0, max=MOST_SEED)] = 0,
    ranks: Annotated[
        int | None,
        typer.Option(help="Show instead what this many context-parallel ranks would send.", min=1),
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
    kv_heads = num_kv_heads or num_heads
    if ranks is not None:
        if ranks**2 * kv_heads > MOST_ROWS:
            raise ValueError(
                f"--ranks is {ranks} with {kv_heads} key/value heads, but at most {MOST_ROWS} numbers, one per "
                "head and pair of ranks, are computed; pass fewer ranks or heads"
            )
        halo = halos.static_halo(
            halos.even_lengths(length, ranks),
            alibi_slopes(num_heads),
            score_bound=score_bound,
            causal=causal,
            window=window,
            tolerance=tolerance,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
        )
        print(
            f"{halo}\nassuming the published slopes and scores of at most ±{score_bound:g}; "
            "without such a bound, the norms of q and k decide"
        )
        return
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, count, length, head_dim) for count in (num_heads, kv_heads, kv_heads)]
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
