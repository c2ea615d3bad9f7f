"""Everything that a GPU can tell in eight minutes: conformance first, then the attack on the certificate, then speed.

    python tests/support/interpreter/everything_on_device.py runs/gpu                                         on a GPU
    TRITON_INTERPRET=1 python tests/support/interpreter/everything_on_device.py runs/gpu --scale smoke    a rehearsal

It needs this source tree, torch, numpy and Triton, and nothing installed. Each part runs in its own process, with a time limit,
and leaves its records and `log.txt` in a folder such as `attack-1`. Started again, it repeats only the parts that did not
pass, in new folders. The exit status is 1 if a part did not pass.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
CONFORMANCE = str(Path(__file__).with_name("conformance_on_device.py"))
LENGTHS = (512, 2048, 8192, 16384, 65536, 131072)
LINES = 12  # of a part's log that are printed


class Part(NamedTuple):
    """The arguments of Python, to which the folder for records is added, and the time limit."""

    arguments: Sequence[str]
    seconds: float


PARTS: Mapping[str, Mapping[str, Part]] = {
    "full": {
        "conformance": Part((CONFORMANCE, "--draws", "0"), 165),
        "attack": Part((CONFORMANCE, "--cases", "0", "--draws", "2000", "--seconds", "90"), 125),
        "bench": Part((__file__, "--bench"), 190),
    },
    "smoke": {
        "conformance": Part((CONFORMANCE, "--draws", "0", "--cases", "1"), 600),
        "attack": Part((CONFORMANCE, "--cases", "0", "--draws", "2"), 600),
        "bench": Part((__file__, "--bench", "--scale", "smoke"), 600),
    },
}


def everything(out: Path, parts: Mapping[str, Part]) -> int:
    """Runs the parts that have not passed yet, and returns the exit status."""
    failed = []
    for name, part in parts.items():
        tried = sorted(out.glob(f"{name}-*"))
        if any((folder / "passed").exists() for folder in tried):
            print(f"{name} has passed already", flush=True)
            continue
        folder = out / f"{name}-{len(tried) + 1}"
        came = run(part, folder)
        if came == "passed":
            (folder / "passed").touch()
        else:
            failed.append(name)
        last = (folder / "log.txt").read_text(encoding="utf-8").splitlines()[-LINES:]
        print("\n".join([f"{name} {came}; {folder}", *(f"    {line}" for line in last)]), flush=True)
    return int(bool(failed))


def run(part: Part, folder: Path) -> str:
    """What came of a part. Its processes end with it."""
    folder.mkdir(parents=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", *part.arguments, str(folder.resolve())],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(part.seconds)
            return "passed" if status == 0 else f"failed with exit status {status}"
        except subprocess.TimeoutExpired:
            return f"was stopped after {part.seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def bench(out: Path, scale: str) -> None:
    """`alibi bench gpu`, without its command line, which needs typer."""
    from alibi_lab.measure.gpu import gpu

    if scale == "smoke":
        gpu(out, lengths=(64,), shapes=((2, 16),), kinds=("noise",), scale="smoke")
    else:
        gpu(out, lengths=LENGTHS, kinds=("noise",), seconds=165)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", choices=PARTS, default="full")
    parser.add_argument("--bench", action="store_true", help="only time the kernels, in this process")
    asked = parser.parse_args()
    sys.exit(bench(asked.out, asked.scale) if asked.bench else everything(asked.out, PARTS[asked.scale]))
