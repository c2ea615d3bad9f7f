"""`alibi bench`: measure on this machine, check before timing, and keep what came out as records."""

from pathlib import Path
from typing import Annotated

import typer

from alibi_attn.cli.console import needs

app = typer.Typer(
    help="Measure on this machine: every benchmark checks its peers first, and writes records that `alibi report` draws.",
    no_args_is_help=True,
)

Out = Annotated[Path, typer.Option(help="Folder for the records.")]


@app.command()
def cpu(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 1024,8192; default 512 … 65536.")] = "",
    kinds: Annotated[str, typer.Option(help="Inputs: noise, peaked, sink.")] = "noise",
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns of a length and direction.")] = 20.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once, as in training on short texts.")] = 1,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="Measure ours with so much dropout, too.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16, beside ours in fp32.")] = "float32",
) -> None:
    """Causal ALiBi attention, ours against what users would pick instead, forward and backward.

    Example: alibi bench cpu --lengths 1024,2048 --no-memory
    """
    with needs("torch"):
        from alibi_attn.bench.cpu import LENGTHS, cpu

    asked = _numbers(lengths) or LENGTHS
    paths = cpu(
        out, lengths=asked, batch=batch, kinds=kinds.split(","), repeats=repeats, budget_s=seconds, memory=memory,
        dropout_p=dropout, dtype=dtype, say=typer.echo,
    )  # fmt: skip
    _tell(paths)


@app.command()
def trained(
    out: Out = Path("results"),
    scale: Annotated[str, typer.Option(help="smoke or small.")] = "small",
    run: Annotated[Path, typer.Option(help="Folder of the training, and of the captured tensors.")] = Path(
        "runs/trained-reach"
    ),
) -> None:
    """Train a small ALiBi model and hold the certified reach of its heads against the distance that really matters.

    Example: alibi bench trained --scale smoke --out /tmp/records
    """
    with needs("lab"):
        from alibi_attn.recipes.trained_reach import trained_reach

    _tell(trained_reach(out, scale=scale, run_folder=run, say=typer.echo))


@app.command("trained-gates")
def trained_gates(
    out: Out = Path("results"),
    scale: Annotated[str, typer.Option(help="smoke or small.")] = "small",
    text: Annotated[list[Path] | None, typer.Option(help="A text file or folder; may be given several times.")] = None,
    run: Annotated[Path, typer.Option(help="Folder of the trainings.")] = Path("runs/trained-gates"),
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns of a length and direction.")] = 10.0,
) -> None:
    """Train small models with forget gates, and measure attention on what they have learned as `bench gates` does on noise.

    Example: alibi bench trained-gates --scale smoke --out /tmp/records
    """
    with needs("lab"):
        from alibi_attn.recipes.trained_gates import trained_gates

    paths = trained_gates(
        out, scale=scale, text=text or (), run_folder=run, repeats=repeats, budget_s=seconds, say=typer.echo
    )
    _tell(paths)


@app.command()
def training(
    out: Out = Path("results"),
    scale: Annotated[str, typer.Option(help="smoke, small or medium: model and batch of the recipes.")] = "medium",
    methods: Annotated[str, typer.Option(help="Position methods.")] = "alibi,sinusoidal,rotary,t5",
    lengths: Annotated[
        str, typer.Option(help="Tokens of an example, as in 128,768; default as the scale trains.")
    ] = "",
    threads: Annotated[int, typer.Option(min=1, help="Of steps and products; costs of recipes are for one.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 9,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns.")] = 300.0,
) -> None:
    """What share of the processor's matrix rate a training reaches (MFU), in fp32 and in bf16, and where its time goes.

    Example: alibi bench training --scale small --methods alibi
    """
    with needs("lab"):
        from alibi_attn.recipes.utilization import training_utilization

    path = training_utilization(
        out, scale=scale, methods=methods.split(","), lengths=_numbers(lengths, "lengths", "128,768"), threads=threads,
        repeats=repeats, budget_s=seconds, say=typer.echo,
    )  # fmt: skip
    _tell([path])


@app.command()
def serving(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 1024,8192; default 512 … 16384.")] = "",
    families: Annotated[str, typer.Option(help="Of bloom, mpt and falcon.")] = "bloom,mpt,falcon",
) -> None:
    """BLOOM, MPT and Falcon-RW of transformers at long length, as they come and patched: time and peak memory.

    Example: alibi bench serving --lengths 1024,2048
    """
    with needs("hf"):
        from alibi_attn.bench.serving import LENGTHS, UNPATCHED_LENGTHS, serving
        from alibi_attn.hf import patch

    asked = _numbers(lengths) or LENGTHS
    unpatched = tuple(length for length in asked if length <= max(UNPATCHED_LENGTHS))
    _tell(
        serving(
            out, patch=patch, lengths=asked, unpatched_lengths=unpatched, families=families.split(","), say=typer.echo
        )
    )  # fmt: skip


@app.command()
def embedding(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens of single texts; default 512,2048,8192.")] = "",
    mixed: Annotated[str, typer.Option(help="Tokens of the texts of one batch; default 1024 … 32.")] = "",
    layers: Annotated[int, typer.Option(min=1, help="Of the encoder.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Passes at most.")] = 5,
    seconds: Annotated[
        float, typer.Option(help="Seconds after which no further pass of a peer and length begins.")
    ] = 15.0,
) -> None:
    """An encoder of base size: ours, the original's arithmetic with a dense bias, that by SDPA, and a BERT without any bias.

    Example: alibi bench embedding --lengths 512,2048 --layers 2
    """
    with needs("hf"):
        from alibi_attn.bench.embedding import LENGTHS, MIXED, embedding
        from alibi_attn.bench.encoder_peers import Sizes
        from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel

    paths = embedding(
        out, config_class=ALiBiBertConfig, model_class=ALiBiBertModel, lengths=_numbers(lengths) or LENGTHS,
        mixed=_numbers(mixed) or MIXED, sizes=Sizes(layers=layers), repeats=repeats, budget_s=seconds, say=typer.echo,
    )  # fmt: skip
    _tell(paths)


@app.command()
def generating(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Cached tokens, as in 8192,65536.")] = "",
) -> None:
    """One new token of a whole BLOOM with a long cache, as it comes, patched, and patched with ALiBiCache; also under padding.

    Example: alibi bench generating --lengths 8192,65536
    """
    with needs("hf"):
        from alibi_attn.bench.generating import LENGTHS, generating
        from alibi_attn.hf import ALiBiCache, patch

    _tell([generating(out, patch=patch, alibi_cache=ALiBiCache, lengths=_numbers(lengths) or LENGTHS, say=typer.echo)])


@app.command()
def streaming(
    out: Out = Path("results"),
    tokens: Annotated[int, typer.Option(min=1000, help="How many tokens stream by.")] = 100_000,
    gates: Annotated[bool, typer.Option(help="Layers with forget gates instead of slopes.")] = False,
) -> None:
    """A long stream through caches that forget with a certificate: flat time and memory, equal to the full pass.

    Example: alibi bench streaming --tokens 20000
    """
    with needs("torch"):
        from alibi_attn.bench.streaming import streaming

    _tell([streaming(out, tokens=tokens, gates=gates, say=typer.echo)])


@app.command()
def decoding(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Cached tokens, as in 4096,65536.")] = "",
) -> None:
    """One new token with a long cache: all keys against those within reach.

    Example: alibi bench decoding --lengths 4096,65536
    """
    with needs("torch"):
        from alibi_attn.bench.decoding import LENGTHS, decoding

    asked = _numbers(lengths) or LENGTHS
    _tell([decoding(out, lengths=asked, say=typer.echo)])


@app.command()
def gates(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 2048,8192; default 2048 … 32768.")] = "",
    logits: Annotated[str, typer.Option(help="Of the gates, whole numbers; 12 forgets nothing. Default 2,4,6.")] = "",
    bounds: Annotated[str, typer.Option(help="Of the scores, whole numbers; default 8,16.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns of a length and direction.")] = 10.0,
) -> None:
    """Attention with forget gates: ours, causal SDPA without any, a dense bias, and the scores that ACP's boundary would take.

    Example: alibi bench gates --lengths 2048,8192
    """
    with needs("torch"):
        from alibi_attn.bench.gates import BOUNDS, LENGTHS, LOGITS, gates

    paths = gates(
        out,
        lengths=_numbers(lengths) or LENGTHS,
        logits=_numbers(logits, "logits", "2,4") or LOGITS,
        bounds=_numbers(bounds, "bounds", "8,16") or BOUNDS,
        repeats=repeats,
        budget_s=seconds,
        say=typer.echo,
    )
    _tell(paths)


@app.command("context-parallel")
def context_parallel(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 16384,65536; default 16384 … 131072.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "2,4",
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns of a length.")] = 20.0,
) -> None:
    """One sequence on several local processes: halos against an all-gather of keys and values, rows and time.

    Example: alibi bench context-parallel --lengths 16384 --ranks 2
    """
    with needs("torch"):
        from alibi_attn.bench.context_parallel import LENGTHS, context_parallel

    asked, counts = _numbers(lengths) or LENGTHS, _numbers(ranks, "ranks", "2,4")
    _tell(context_parallel(out, lengths=asked, ranks=counts, repeats=repeats, budget_s=seconds, say=typer.echo))


@app.command()
def gpu(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 2048,16384; default 1024 … 1048576.")] = "",
    heads: Annotated[str, typer.Option(help="Numbers and sizes of heads.")] = "16x128,32x64",
    kinds: Annotated[str, typer.Option(help="Inputs: noise, peaked.")] = "noise,peaked",
    seconds: Annotated[float, typer.Option(help="Seconds at most, in all.")] = 540.0,
    smoke: Annotated[bool, typer.Option(help="A CPU and Triton's interpreter; set TRITON_INTERPRET=1.")] = False,
) -> None:
    """Our Triton kernels against what users would pick instead, on one CUDA device, in under ten minutes.

    Example: python -m alibi_attn bench gpu --lengths 2048,16384 --heads 16x128
    """
    with needs("torch"):
        from alibi_attn.bench.gpu import LENGTHS, gpu

    shapes = [_shape(shape) for shape in heads.split(",")]
    asked = _numbers(lengths) or LENGTHS
    paths = gpu(out, lengths=asked, heads=shapes, kinds=kinds.split(","), budget_s=seconds, smoke=smoke, say=typer.echo)
    _tell(paths)


@app.command()
def jax(
    out: Out = Path("results"),
    lengths: Annotated[str, typer.Option(help="Tokens, as in 1024,8192.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds at most for the turns of a length and direction.")] = 20.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
) -> None:
    """Our JAX attention against jax.nn.dot_product_attention with a dense bias, and without any.

    Example: alibi bench jax --lengths 1024,4096
    """
    with needs("torch,jax"):
        from alibi_attn.bench.jax_attention import LENGTHS, jax_attention

    asked = _numbers(lengths) or LENGTHS
    _tell(jax_attention(out, lengths=asked, repeats=repeats, budget_s=seconds, memory=memory, say=typer.echo))


def _numbers(text: str, name: str = "lengths", example: str = "1024,8192") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} is {text!r} but must be whole numbers with commas between them, as in {example}")
    return tuple(map(int, parts))


def _shape(text: str) -> tuple[int, int]:
    count, _, size = text.strip().partition("x")
    if not (count.isdecimal() and size.isdecimal() and int(count) > 0 and int(size) > 0):
        raise ValueError(f"heads has {text!r} but must be a number and a size of heads, as in 16x128")
    return int(count), int(size)


def _tell(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"record {path}")
