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
        extra: the extra of this package to install.
        least: the smallest values of whole numbers, by option; by default 1, or 0 if that is the option's default.
        function: "module:function"; by default both have the command's name, in this folder.
    """

    example: str
    extra: str = "torch"
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)
    function: str = ""


BENCHMARKS: Mapping[str, Benchmark] = {
    "attention": Benchmark("--lengths 1024,2048"),
    "decoding": Benchmark("--lengths 4096,65536"),
    "models": Benchmark("--models bloom,mpt --lengths 1024", "hf"),
    "texts": Benchmark(
        "--parts document --tokens 20000 --layers 2", "hf", {"tokens": 512, "checked": 512, "processes": 2}
    ),
    "training": Benchmark("--scale small --methods alibi", "lab"),
    "host": Benchmark("--label before"),
    "context-parallel": Benchmark("--lengths 16384 --ranks 2"),
}
