"""How close the inner loops of the kernels come to a processor's multiply-add rate, according to llvm-mca.

    python tests/support/processes/inner_loops.py     # needs ziglang (PyPI) and llvm-mca of LLVM 19 or newer

Older versions of LLVM model the Neoverse cores wrongly. Nothing is run: this is a model, not a measurement.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from alibi_attn.attention.backends.native import build

SOURCE = Path(__file__).with_suffix(".cpp")
TARGETS = (  # zig's target, flags, LLVM's target, and multiply-adds per cycle of each processor
    (
        "aarch64-linux-musl",
        (),
        "aarch64-linux-gnu",
        {"neoverse-n1": 2, "neoverse-v1": 4, "neoverse-v2": 4, "apple-m1": 4},
    ),
    ("x86_64-linux-musl", ("-march=x86_64_v3",), "x86_64-linux-gnu", {"haswell": 2, "znver3": 2}),
)
MULTIPLY_ADD = re.compile(r"\t(vfmadd\d+ps|fmla)\t")
ON_STACK = re.compile(r"\[sp|\(%rsp\)")
LABEL = re.compile(r"^([.\w$]+):")
BRANCH = re.compile(r"^\t(?:j[a-z]+|b\.\w+|b|cbn?z)\t(?:\w+, )?([.\w$]+)$")
ITERATIONS = 200


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
    command = ["llvm-mca-19", f"-mtriple={triple}", f"-mcpu={processor}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(body), capture_output=True, text=True, check=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", done.stdout)[1]) / ITERATIONS


def _multiply_adds(body: list[str]) -> int:
    return sum(bool(MULTIPLY_ADD.search(line)) for line in body)


def main() -> None:
    if shutil.which("llvm-mca-19") is None:
        sys.exit("llvm-mca-19 is not installed (Debian: apt install llvm-19)")
    for zig, flags, triple, processors in TARGETS:
        command = [sys.executable, "-m", "ziglang", "c++", "-target", zig, *flags, *build.FLAGS, "-g0", "-S"]
        with tempfile.NamedTemporaryFile(suffix=".s") as file:
            subprocess.run([*command, f"-I{build.FOLDER}", str(SOURCE), "-o", file.name], check=True)
            assembly = Path(file.name).read_text()
        for function, body in innermost_loops(assembly).items():
            count, spills = _multiply_adds(body), sum(bool(ON_STACK.search(line)) for line in body)
            for processor, rate in processors.items():
                share = count / rate / cycles(body, triple, processor)
                print(f"{function} {processor}: {count} multiply-adds, {share:.2f} of the rate, {spills} on the stack")


if __name__ == "__main__":
    main()
