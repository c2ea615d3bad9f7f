"""The benchmarks of `alibi bench`, as one literal table.

A benchmark is a function `(out, *, …, say) -> list[Path]` in its own file. The file's first sentence, which names the command,
is the command's help, and the function's documented arguments are its options (`cli/bench.py`). An empty value is not passed,
so that the function's own default applies. The files are not imported here, so `alibi bench --help` loads no framework.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command of `alibi bench`.

    Args:
        example: options of a command line.
        function: "module:function"; by default both have the command's name, in this folder.
        extra: the extra of this package to install.
        least: the smallest values of whole numbers, by option; 1 where nothing is said.
    """

    example: str
    function: str = ""
    extra: str = "torch"
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)


BENCHMARKS: Mapping[str, Benchmark] = {
    "cpu": Benchmark("--lengths 1024,2048 --no-memory"),
    "trained": Benchmark(
        "--scale smoke --out /tmp/records", function="alibi_lab.measure.trained_reach:trained_reach", extra="lab"
    ),
    "trained-gates": Benchmark("--scale smoke --out /tmp/records", extra="lab"),
    "training": Benchmark("--scale small --methods alibi", extra="lab"),
    "serving": Benchmark("--lengths 1024,2048", extra="hf"),
    "embedding": Benchmark("--lengths 512,2048 --layers 2", extra="hf"),
    "passages": Benchmark(
        "--text novels --out /tmp/records", function="alibi_lab.measure.passage_search:passages", extra="hf"
    ),
    "int8": Benchmark(
        "--checkpoint runs/quick/checkpoints/quick/alibi-128/seed-0-…",
        function="alibi_lab.measure.int8_error:int8_error",
        extra="lab",
        least={"length": 2, "tokens": 4},
    ),
    "late-chunking": Benchmark(
        "--tokens 20000 --layers 2",
        function="alibi_lab.measure.long_document:long_document",
        extra="hf",
        least={"tokens": 512, "checked": 512},
    ),
    "generating": Benchmark("--lengths 8192,65536", extra="hf"),
    "next-tokens": Benchmark("--lengths 512,2048", extra="hf", least={"width": 64, "vocabulary": 2}),
    "streaming": Benchmark("--tokens 20000", least={"tokens": 1000}),
    "long-texts": Benchmark("--tokens 262144", extra="hf", least={"tokens": 20000, "width": 64, "processes": 2}),
    "decoding": Benchmark("--lengths 4096,65536"),
    "gates": Benchmark("--lengths 2048,8192"),
    "context-parallel": Benchmark("--lengths 16384 --ranks 2"),
    "gpu": Benchmark("--lengths 2048,16384 --shapes 16x128"),
    "gpu-models": Benchmark("--parts graphs,kernels"),
    "host": Benchmark("--label before"),
    "jax": Benchmark(
        "--lengths 1024,4096", function="alibi_lab.measure.jax_attention:jax_attention", extra="torch,jax"
    ),
}
