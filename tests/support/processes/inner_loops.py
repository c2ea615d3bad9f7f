"""How close the inner loops of the kernels come to a processor's multiply-add rate, according to llvm-mca.

    python tests/support/processes/inner_loops.py results    # needs ziglang (PyPI), g++ and llvm-mca of LLVM 19

Older versions of LLVM model the Neoverse cores wrongly. Nothing is run: this is a model, not a measurement.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.levels import OF_MACHINE
from alibi_lab import records

SOURCE = Path(__file__).with_suffix(".cpp")
MCA = "llvm-mca-19"
ZIG = (sys.executable, "-m", "ziglang", "c++", "-target")
AVX2, WITH_BF16 = OF_MACHINE["x86_64"][-1].flags, OF_MACHINE["aarch64"][0].flags
NEON = {"neoverse-n1": 2, "neoverse-v1": 4, "neoverse-v2": 4, "apple-m1": 4}  # vector multiply-adds per cycle
ARM_BF16 = {"neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4}  # the same number of bfdot, each of eight products
X86 = {"haswell": 2, "znver3": 2}
TARGETS = (  # the dtype, the compiler, its command, LLVM's name of the system, and the processors
    ("float32", "zig", (*ZIG, "aarch64-linux-musl"), "aarch64-linux-gnu", NEON),
    ("bfloat16", "zig", (*ZIG, "aarch64-linux-musl", *WITH_BF16), "aarch64-linux-gnu", ARM_BF16),
    ("float32", "zig", (*ZIG, "x86_64-linux-musl", *AVX2), "x86_64-linux-gnu", X86),
    ("float32", "g++", ("g++", *AVX2), "x86_64-linux-gnu", X86),
)
# The products of `inner_loops.cpp`, by the instance of `product` that each calls.
LOOPS = {"5Start0": "forward scores", "5Start2": "forward values", "5Start1": "backward gradients"}
MULTIPLY_ADD = re.compile(r"\t(vfmadd\d+ps|fmla|bfdot)\t")
ON_STACK = re.compile(r"\[sp|\(%rsp\)")
LABEL = re.compile(r"^([.\w$]+):")
BRANCH = re.compile(r"^\t(?:j[a-z]+|b\.\w+|b|cbn?z)\t(?:\w+, )?([.\w$]+)$")
ITERATIONS = 200


class Row(NamedTuple):
    """One loop on one processor; `share` is of its rate of multiply-adds."""

    loop: str
    dtype: str
    compiler: str
    processor: str
    multiply_adds: int
    share: float
    spills: int


def innermost_loops(assembly: str) -> dict[str, list[str]]:
    """For each function, the instructions of the innermost loop that has the most multiply-adds."""
    lines = [re.sub(r"\s*(//|# ).*", "", line) for line in assembly.splitlines()]
    lines = [line for line in lines if line and not line.startswith("\t.")]
    labels: dict[str, int] = {}
    loops: dict[str, list[str]] = {}
    function = ""
    for at, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = at
            function = function if label[1].startswith(".") else label[1]
        branch = BRANCH.match(line)
        if branch and branch[1] in labels:
            body = lines[labels[branch[1]] + 1 : at + 1]
            if not any(map(LABEL.match, body)) and _multiply_adds(body) > _multiply_adds(loops.get(function, [])):
                loops[function] = body
    return loops


def cycles(body: list[str], triple: str, processor: str) -> float:
    """Cycles per iteration in a steady state."""
    command = [MCA, f"-mtriple={triple}", f"-mcpu={processor}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(body), capture_output=True, text=True, check=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", done.stdout)[1]) / ITERATIONS


def _multiply_adds(body: list[str]) -> int:
    return sum(bool(MULTIPLY_ADD.search(line)) for line in body)


def record(folder: Path) -> Path:
    rows = [row for target in TARGETS for row in _rows(*target)]
    columns = {name: [getattr(row, name) for row in rows] for name in Row._fields}
    made = records.make(
        "compilation",
        "native/inner-loops",
        config={"model": MCA, "ziglang": metadata.version("ziglang"), "iterations": ITERATIONS},
        metrics={
            "least_share_neoverse": min(row.share for row in rows if row.processor.startswith("neoverse")),
            "least_share_avx2": min(row.share for row in rows if row.processor in X86),
            "spills": sum(row.spills for row in rows),
        },
        curves={"loops": columns},
    )
    for row in rows:
        print("{}, {}, {}, {}: {} multiply-adds, {:.2f} of the rate, {} spills".format(*row))
    return records.save(made, folder)


def _rows(dtype: str, compiler: str, command: tuple[str, ...], triple: str, processors: dict[str, int]) -> list[Row]:
    with tempfile.NamedTemporaryFile(suffix=".s") as file:
        flags = [*build.FLAGS, "-g0", "-S", f"-I{build.FOLDER}"]
        subprocess.run([*command, *flags, str(SOURCE), "-o", file.name], check=True, stderr=subprocess.DEVNULL)
        loops = innermost_loops(Path(file.name).read_text())
    rows = []
    for function, body in loops.items():
        loop = next(words for part, words in LOOPS.items() if part in function)
        count, spills = _multiply_adds(body), sum(bool(ON_STACK.search(line)) for line in body)
        rows += [
            Row(loop, dtype, compiler, name, count, count / rate / cycles(body, triple, name), spills)
            for name, rate in processors.items()
        ]
    assert len(rows) == len(LOOPS) * len(processors), f"{compiler} inlined the loops of {list(loops)} otherwise"
    return rows


if __name__ == "__main__":
    if shutil.which(MCA) is None:
        sys.exit(f"{MCA} is not installed (Debian: apt install llvm-19)")
    print(record(Path(sys.argv[1])))
