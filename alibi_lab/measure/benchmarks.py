"""The benchmarks of `alibi bench`, as one literal table: what each command measures, runs and accepts.

A benchmark is a function `(out, *, …, say) -> list[Path]` in its own file. Its options are keyword arguments of the same
names; an empty value is not passed, so that the function's own default applies. The benchmarks' modules are not imported here,
so `alibi bench --help` loads no framework.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a benchmark.

    Args:
        name: name of the argument; the option spells it with hyphens.
        default: shown by --help; its type is the option's type. "" = the function's own default.
        read: parses (text, name) into the argument's value.
        limits: the limits of a number, as keyword arguments of typer.Option.
        type: the option's type, if it is not the default's.
    """

    name: str
    default: Any
    help: str
    read: Callable[[str, str], object] | None = None
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    type: Any = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command of `alibi bench`.

    Args:
        help: what the command measures.
        example: a command line.
        function: "module:function"; by default both have the command's name, in this folder.
        extra: the extra of this package to install.
    """

    help: str
    example: str
    options: tuple[Option, ...]
    function: str = ""
    extra: str = "torch"


def whole_numbers(example: str) -> Callable[[str, str], tuple[int, ...]]:
    """A parser of positive integers separated by commas."""

    def read(text: str, name: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"{name} is {text!r} but must be whole numbers separated by commas, as in {example}")
        return tuple(map(int, parts))

    return read


def names(text: str, name: str) -> list[str]:
    """Parses names separated by commas."""
    return text.split(",")


def shapes(text: str, name: str) -> list[tuple[int, int]]:
    """Parses pairs (number of heads, head size), as in 16x128,32x64."""
    pairs = [part.strip().partition("x")[::2] for part in text.split(",")]
    for part, pair in zip(text.split(","), pairs, strict=True):
        if not all(number.isdecimal() and int(number) > 0 for number in pair):
            raise ValueError(f"{name} has {part!r} but must be NUMBERxSIZE of heads, as in 16x128")
    return [(int(count), int(size)) for count, size in pairs]


def lengths(help: str, example: str = "1024,8192", *, name: str = "lengths") -> Option:
    return Option(name, "", help, whole_numbers(example))


def seconds(default: float, help: str = "Time limit in seconds per length and direction.") -> Option:
    return Option("seconds", default, help)


def repeats(default: int = 5, help: str = "Most turns per call; the median counts.") -> Option:
    return Option("repeats", default, help, limits={"min": 1})


MEMORY = Option("memory", True, "Also measure peak memory at 8192, 16384, 32768 and 65536 tokens.")
SMALL = Option("scale", "small", "smoke or small.")
ON_A_GPU = Option(
    "scale", "full", "full; or smoke, which runs on a CPU in Triton's interpreter (set TRITON_INTERPRET=1)."
)

BENCHMARKS: Mapping[str, Benchmark] = {
    "cpu": Benchmark(
        "Causal ALiBi attention, forward and backward: ours compared with what users would run instead.",
        "alibi bench cpu --lengths 1024,2048 --no-memory",
        (
            lengths("Sequence lengths, as in 1024,8192; default 512 … 65536."),
            Option("kinds", "noise", "Kinds of input: noise, peaked, sink.", names),
            repeats(),
            seconds(20.0),
            MEMORY,
            Option("batch", 1, "Sequences per batch, as in training on short texts.", limits={"min": 1}),
            Option(
                "dropout", 0.0, "Also measure ours with this dropout probability.", limits={"min": 0.0, "max": 0.99}
            ),
            Option("dtype", "float32", "float32; or bfloat16, which also runs ours in fp32."),
        ),
    ),
    "trained": Benchmark(
        "Train a small ALiBi model and compare the certified reach of its heads with their true reach, computed in fp64.",
        "alibi bench trained --scale smoke --out /tmp/records",
        (SMALL, Option("run", Path("runs/trained-reach"), "Folder for the training and the captured tensors.")),
        function="alibi_lab.measure.trained_reach:trained_reach",
        extra="lab",
    ),
    "trained-gates": Benchmark(
        "Train small models with forget gates, and measure attention on the gates they learned as `bench gates` does on noise.",
        "alibi bench trained-gates --scale smoke --out /tmp/records",
        (
            SMALL,
            Option("text", None, "A text file or folder; can be repeated.", type=list[Path] | None),
            Option("run", Path("runs/trained-gates"), "Folder for the trainings."),
            repeats(),
            seconds(10.0),
        ),
        extra="lab",
    ),
    "training": Benchmark(
        "The share of the processor's matrix rate that training reaches (MFU), in fp32 and bf16, and where the time is spent.",
        "alibi bench training --scale small --methods alibi",
        (
            Option("scale", "medium", "smoke, small or medium: model and batch of the recipes."),
            Option("methods", "alibi,sinusoidal,rotary,t5", "Position methods.", names),
            lengths("Training lengths, as in 128,768; default the length of the scale.", "128,768"),
            Option("threads", 1, "Number of threads. Recipe costs are quoted for one.", limits={"min": 1}),
            repeats(9),
            seconds(300.0, "Time limit in seconds for all turns."),
        ),
        extra="lab",
    ),
    "serving": Benchmark(
        "Time and peak memory of BLOOM, MPT, Falcon-RW and T5's encoder from transformers, unmodified and patched.",
        "alibi bench serving --lengths 1024,2048",
        (
            lengths("Sequence lengths, as in 1024,8192; default 512 … 16384."),
            Option("families", "bloom,mpt,falcon,t5", "Model families: bloom, mpt, falcon, t5.", names),
        ),
        extra="hf",
    ),
    "embedding": Benchmark(
        "A base-size encoder: ours, the original's arithmetic, SDPA, ONNX Runtime, llama.cpp, and a BERT without a bias.",
        "alibi bench embedding --lengths 512,2048 --layers 2",
        (
            Option("precisions", "float32,bfloat16,int8", "Some of float32, bfloat16 and int8.", names),
            lengths("Lengths of single texts; default 512,2048,8192."),
            lengths("Lengths of the texts in one mixed batch; default 1024 … 32.", "1024,8192", name="mixed"),
            Option("layers", 12, "Number of layers.", limits={"min": 1}),
            repeats(3, "Most passes per process; the median of all counts."),
            seconds(10.0, "Time limit in seconds per process."),
            Option("rounds", 3, "Processes per encoder and length, in turns.", limits={"min": 1}),
        ),
        extra="hf",
    ),
    "passages": Benchmark(
        "Train small encoders on books, and search passages of other books: late chunking, or chunks embedded alone; also int8.",
        "alibi bench passages --text novels --out /tmp/records",
        (
            Option("text", None, "Folder with one .txt file per book; can be repeated.", type=list[Path] | None),
            SMALL,
            Option("run", Path("runs/passages"), "Folder for the trainings, which resume."),
        ),
        function="alibi_lab.measure.passage_search:passages",
        extra="hf",
    ),
    "int8": Benchmark(
        "What linear layers in int8 change in a decoder trained by the lab: logits and perplexity on held-out text.",
        "alibi bench int8 --checkpoint runs/quick/checkpoints/quick/alibi-128/seed-0-…",
        (
            Option(
                "checkpoint", None, "Folder of a trained model; its tokens are in its run's folder.", type=Path | None
            ),
            Option("length", 512, "Tokens per piece of text.", limits={"min": 2}),
            Option("tokens", 32_768, "Most tokens.", limits={"min": 4}),
        ),
        function="alibi_lab.measure.int8_error:int8_error",
        extra="lab",
    ),
    "late-chunking": Benchmark(
        "Late chunking of one long document at base size: time, peak memory, and its vectors compared with one undivided pass.",
        "alibi bench late-chunking --tokens 20000 --layers 2",
        (
            Option("tokens", 100_000, "Tokens of the document.", limits={"min": 512}),
            Option("checked", 16_384, "Tokens of the document whose vectors are compared.", limits={"min": 512}),
            Option("chunk", 256, "Tokens per chunk.", limits={"min": 1}),
            Option("layers", 12, "Number of layers.", limits={"min": 1}),
            Option("dtype", "float32", "float32 or bfloat16."),
        ),
        function="alibi_lab.measure.long_document:long_document",
        extra="hf",
    ),
    "generating": Benchmark(
        "Decode one token of a whole BLOOM with a long cache: unmodified, patched, and patched with ALiBiCache; also padded.",
        "alibi bench generating --lengths 8192,65536",
        (lengths("Numbers of cached tokens, as in 8192,65536."),),
        extra="hf",
    ),
    "next-tokens": Benchmark(
        "Decode tokens after a prompt with a BLOOM in fp32, bf16 and int8, compared with llama.cpp and CTranslate2.",
        "alibi bench next-tokens --lengths 512,2048",
        (
            lengths("Lengths of the prompt; default 512,2048,8192."),
            Option("tokens", 32, "Tokens per run; their mean is one measurement.", limits={"min": 1}),
            Option("width", 1024, "Width of the random BLOOM.", limits={"min": 64}),
            Option("layers", 2, "Layers of the random BLOOM; BLOOM-560m has 24.", limits={"min": 1}),
            Option("vocabulary", 1000, "Its number of tokens; BLOOM-560m has 250880.", limits={"min": 2}),
            repeats(help="Runs per program; the median counts."),
        ),
        extra="hf",
    ),
    "streaming": Benchmark(
        "Stream many tokens through caches that drop keys with a certificate: flat time and memory, outputs of a full pass.",
        "alibi bench streaming --tokens 20000",
        (
            Option("tokens", 100_000, "Number of tokens to stream.", limits={"min": 1000}),
            Option("gates", False, "Use layers with forget gates instead of slopes."),
        ),
    ),
    "long-texts": Benchmark(
        "Read a long text into a cache in files: time per token and memory; bytes read on opening; memory of shared caches.",
        "alibi bench long-texts --tokens 262144",
        (
            Option("tokens", 1_000_000, "Length of the text. An interrupted reading resumes.", limits={"min": 20_000}),
            Option("width", 1024, "Width of the random BLOOM, with heads of size 64.", limits={"min": 64}),
            Option("layers", 2, "Layers of the random BLOOM.", limits={"min": 1}),
            Option("processes", 10, "Processes that share the cache.", limits={"min": 2}),
            Option(
                "cache", "", "Folder of the cache, which stays; on a disk, not in memory. Default: next to the record."
            ),
        ),
        extra="hf",
    ),
    "decoding": Benchmark(
        "Decode one token with a long cache: all keys, compared with only the keys within reach.",
        "alibi bench decoding --lengths 4096,65536",
        (lengths("Numbers of cached tokens, as in 4096,65536."),),
    ),
    "gates": Benchmark(
        "Attention with forget gates: ours, SDPA with a dense bias, causal SDPA without gates, and the scores that ACP keeps.",
        "alibi bench gates --lengths 2048,8192",
        (
            lengths("Sequence lengths, as in 2048,8192; default 2048 … 32768."),
            lengths("Mean logits of the gates, as integers; 12 forgets nothing. Default 2,4,6.", "2,4", name="logits"),
            lengths("Bounds of the scores, as integers; default 8,16.", "8,16", name="bounds"),
            repeats(),
            seconds(10.0),
        ),
    ),
    "context-parallel": Benchmark(
        "One sequence on several local processes: halos compared with an all-gather of keys and values, in rows and time.",
        "alibi bench context-parallel --lengths 16384 --ranks 2",
        (
            lengths("Sequence lengths, as in 16384,65536; default 16384 … 131072."),
            Option("ranks", "2,4", "Numbers of processes, as in 2,4.", whole_numbers("2,4")),
            repeats(),
            seconds(20.0, "Time limit in seconds per length."),
        ),
    ),
    "gpu": Benchmark(
        "Our Triton kernels compared with what users would run instead, on one CUDA GPU, in under ten minutes.",
        "python -m alibi_lab bench gpu --lengths 2048,16384 --shapes 16x128",
        (
            lengths("Sequence lengths, as in 2048,16384; default 1024 … 1048576."),
            Option("shapes", "16x128,32x64", "Numbers and sizes of heads, as in 16x128,32x64.", shapes),
            Option("kinds", "noise,peaked", "Kinds of input: noise, peaked.", names),
            seconds(540.0, "Time limit in seconds for the whole benchmark."),
            ON_A_GPU,
        ),
    ),
    "gpu-models": Benchmark(
        "What `gpu` leaves out, in two minutes: CUDA graphs, gates, masks, static caches, each kernel, BLOOM, an encoder, JAX.",
        "alibi bench gpu-models --parts graphs,kernels",
        (
            Option("parts", "", "Parts to measure, in this order; default: all but `make gpu --only encoders`.", names),
            seconds(155.0, "Time limit in seconds for the whole benchmark."),
            ON_A_GPU,
        ),
        function="alibi_lab.measure.gpu_models:gpu_models",
    ),
    "host": Benchmark(
        "What a call of the Triton kernels costs the host, without a GPU: Python time, launches, torch operations, allocations.",
        "alibi bench host --label before",
        (
            Option("label", "present", "Name of the version that is measured; part of the record's name."),
            seconds(1.0, "Seconds per kind of call and direction."),
        ),
    ),
    "jax": Benchmark(
        "Our JAX attention compared with jax.nn.dot_product_attention, with a dense bias and without a bias.",
        "alibi bench jax --lengths 1024,4096",
        (lengths("Sequence lengths, as in 1024,8192."), repeats(), seconds(20.0), MEMORY),
        function="alibi_lab.measure.jax_attention:jax_attention",
        extra="torch,jax",
    ),
}
