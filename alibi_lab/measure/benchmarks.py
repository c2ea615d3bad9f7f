"""The benchmarks of `alibi bench`, as one literal table: what each command measures, and an example.

A benchmark is a function `(out, *, …, say) -> list[Path]` in its own file. Its documented arguments are the command's options
(`cli/bench.py`); an empty value is not passed, so that the function's own default applies. The benchmarks' modules are not
imported here, so `alibi bench --help` loads no framework.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command of `alibi bench`.

    Args:
        help: what the command measures.
        example: a command line.
        function: "module:function"; by default both have the command's name, in this folder.
        extra: the extra of this package to install.
        least: the smallest values of whole numbers, by option; 1 where nothing is said.
    """

    help: str
    example: str
    function: str = ""
    extra: str = "torch"
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)


BENCHMARKS: Mapping[str, Benchmark] = {
    "cpu": Benchmark(
        "Causal ALiBi attention, forward and backward: ours compared with what users would run instead.",
        "alibi bench cpu --lengths 1024,2048 --no-memory",
    ),
    "trained": Benchmark(
        "Train a small ALiBi model and compare the certified reach of its heads with their true reach, computed in fp64.",
        "alibi bench trained --scale smoke --out /tmp/records",
        function="alibi_lab.measure.trained_reach:trained_reach",
        extra="lab",
    ),
    "trained-gates": Benchmark(
        "Train small models with forget gates, and measure attention on the gates they learned as `bench gates` does on noise.",
        "alibi bench trained-gates --scale smoke --out /tmp/records",
        extra="lab",
    ),
    "training": Benchmark(
        "The share of the processor's matrix rate that training reaches (MFU), in fp32 and bf16, and where the time is spent.",
        "alibi bench training --scale small --methods alibi",
        extra="lab",
    ),
    "serving": Benchmark(
        "Time and peak memory of BLOOM, MPT, Falcon-RW and T5's encoder from transformers, unmodified and patched.",
        "alibi bench serving --lengths 1024,2048",
        extra="hf",
    ),
    "embedding": Benchmark(
        "A base-size encoder: ours, the original's arithmetic, SDPA, ONNX Runtime, llama.cpp, and a BERT without a bias.",
        "alibi bench embedding --lengths 512,2048 --layers 2",
        extra="hf",
    ),
    "passages": Benchmark(
        "Train small encoders on books, and search passages of other books: late chunking, or chunks embedded alone; also int8.",
        "alibi bench passages --text novels --out /tmp/records",
        function="alibi_lab.measure.passage_search:passages",
        extra="hf",
    ),
    "int8": Benchmark(
        "What linear layers in int8 change in a decoder trained by the lab: logits and perplexity on held-out text.",
        "alibi bench int8 --checkpoint runs/quick/checkpoints/quick/alibi-128/seed-0-…",
        function="alibi_lab.measure.int8_error:int8_error",
        extra="lab",
        least={"length": 2, "tokens": 4},
    ),
    "late-chunking": Benchmark(
        "Late chunking of one long document at base size: time, peak memory, and its vectors compared with one undivided pass.",
        "alibi bench late-chunking --tokens 20000 --layers 2",
        function="alibi_lab.measure.long_document:long_document",
        extra="hf",
        least={"tokens": 512, "checked": 512},
    ),
    "generating": Benchmark(
        "Decode one token of a whole BLOOM with a long cache: unmodified, patched, and patched with ALiBiCache; also padded.",
        "alibi bench generating --lengths 8192,65536",
        extra="hf",
    ),
    "next-tokens": Benchmark(
        "Decode tokens after a prompt with a BLOOM in fp32, bf16 and int8, compared with llama.cpp and CTranslate2.",
        "alibi bench next-tokens --lengths 512,2048",
        extra="hf",
        least={"width": 64, "vocabulary": 2},
    ),
    "streaming": Benchmark(
        "Stream many tokens through caches that drop keys with a certificate: flat time and memory, outputs of a full pass.",
        "alibi bench streaming --tokens 20000",
        least={"tokens": 1000},
    ),
    "long-texts": Benchmark(
        "Read a long text into a cache in files: time per token and memory; bytes read on opening; memory of shared caches.",
        "alibi bench long-texts --tokens 262144",
        extra="hf",
        least={"tokens": 20000, "width": 64, "processes": 2},
    ),
    "decoding": Benchmark(
        "Decode one token with a long cache: all keys, compared with only the keys within reach.",
        "alibi bench decoding --lengths 4096,65536",
    ),
    "gates": Benchmark(
        "Attention with forget gates: ours, SDPA with a dense bias, causal SDPA without gates, and the scores that ACP keeps.",
        "alibi bench gates --lengths 2048,8192",
    ),
    "context-parallel": Benchmark(
        "One sequence on several local processes: halos compared with an all-gather of keys and values, in rows and time.",
        "alibi bench context-parallel --lengths 16384 --ranks 2",
    ),
    "gpu": Benchmark(
        "Our Triton kernels compared with what users would run instead, on one CUDA GPU, in under ten minutes.",
        "python -m alibi_lab bench gpu --lengths 2048,16384 --shapes 16x128",
    ),
    "gpu-models": Benchmark(
        "What `gpu` leaves out, in two minutes: CUDA graphs, gates, masks, static caches, each kernel, BLOOM, an encoder, JAX.",
        "alibi bench gpu-models --parts graphs,kernels",
        function="alibi_lab.measure.gpu_models:gpu_models",
    ),
    "host": Benchmark(
        "What a call of the Triton kernels costs the host, without a GPU: Python time, launches, torch operations, allocations.",
        "alibi bench host --label before",
    ),
    "jax": Benchmark(
        "Our JAX attention compared with jax.nn.dot_product_attention, with a dense bias and without a bias.",
        "alibi bench jax --lengths 1024,4096",
        function="alibi_lab.measure.jax_attention:jax_attention",
        extra="torch,jax",
    ),
}
