"""Everything that a GPU can tell in eight minutes: conformance first, then speed, then the attack on the certificate.

    python tests/support/interpreter/everything_on_device.py runs/gpu                                         on a GPU
    TRITON_INTERPRET=1 python tests/support/interpreter/everything_on_device.py runs/gpu --scale smoke    a rehearsal

Options: --only PART … runs some parts; --seconds N shares N seconds among the parts in place of their own limits.
It needs this source tree, torch, numpy and Triton, and nothing installed; the part "jax" needs JAX,
the part "models" transformers. Each part runs in its own
process, with a time limit, and leaves its records and `log.txt` in a folder such as `attack-1`. Started again, it repeats only
the parts that did not pass, in new folders. The exit status is 1 if a part did not pass.

The limits are for a warm cache of Triton. With a cold one kernels compile first: conformance counts the cases that it left out,
last rows read "no time was left", and a part may be stopped. Start it again, in another folder to repeat what has passed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import quick_interpreter

ROOT = Path(__file__).parents[3]
CONFORMANCE, COMPILE, CONTEXT = (
    str(Path(__file__).with_name(f"{x}.py")) for x in ("conformance_on_device", "compile_ahead", "context_on_device")
)
LENGTHS = (512, 2048, 8192, 16384, 65536, 131072)
LINES = 12  # of a part's log that are printed


class Part(NamedTuple):
    """The arguments of Python, to which the folder for records is added, and the time limit.

    The argument SECONDS is replaced by the limit without `spare`, which is for starting and for the last measurement.
    """

    arguments: Sequence[str]
    seconds: float
    spare: float = 0.0

    def command(self) -> list[str]:
        inside = f"{max(self.seconds - self.spare, 1.0):.0f}"
        return [inside if argument == SECONDS else argument for argument in self.arguments]


SECONDS = "SECONDS"
PARTS: Mapping[str, Mapping[str, Part]] = {
    "full": {
        "conformance": Part((CONFORMANCE, "--draws", "0", "--seconds", SECONDS), 110, 25),
        "compile": Part((COMPILE, SECONDS), 40, 3),
        "attention": Part((__file__, "--measure", "attention", "--seconds", SECONDS), 110, 20),
        "decoding": Part((__file__, "--measure", "decoding", "--seconds", SECONDS), 35, 10),
        "models": Part((__file__, "--measure", "models", "--seconds", SECONDS), 60, 15),
        "jax": Part((__file__, "--measure", "jax", "--seconds", SECONDS), 45, 8),
        "context": Part((CONTEXT, "--seconds", SECONDS), 20, 4),
        "attack": Part((CONFORMANCE, "--cases", "0", "--draws", "2000", "--seconds", SECONDS), 60, 20),
    },
    "smoke": {
        "conformance": Part((CONFORMANCE, "--draws", "0", "--cases", "1"), 600),
        **{
            what: Part((__file__, "--measure", what, "--scale", "smoke"), 600)
            for what in ("attention", "decoding", "models", "jax")
        },
        "context": Part((CONTEXT, "--scale", "smoke"), 600),
        "attack": Part((CONFORMANCE, "--cases", "0", "--draws", "2"), 600),
    },
}


def chosen(scale: str, only: Sequence[str] = (), seconds: float | None = None) -> dict[str, Part]:
    """The parts to run, all by default, in the order of PARTS; `seconds` is shared as their own limits are."""
    parts = {name: part for name, part in PARTS[scale].items() if not only or name in only}
    share = 1.0 if seconds is None or not parts else seconds / sum(part.seconds for part in parts.values())
    return {name: part._replace(seconds=part.seconds * share) for name, part in parts.items()}


def everything(out: Path, parts: Mapping[str, Part]) -> int:
    """Runs the parts that have not passed yet, and returns the exit status."""
    failed = []
    for name, part in parts.items():
        tried = sorted(out.glob(f"{name}-*"))
        if any((folder / "passed").exists() for folder in tried):
            print(f"{name} has passed already", flush=True)
            continue
        folder = out / f"{name}-{len(tried) + 1}"
        start = time.perf_counter()
        came = run(part, folder)
        took = time.perf_counter() - start
        if came == "passed":
            (folder / "passed").touch()
        else:
            failed.append(name)
        last = (folder / "log.txt").read_text(encoding="utf-8").splitlines()[-LINES:]
        print("\n".join([f"{name} {came}, {took:.0f} s; {folder}", *(f"    {line}" for line in last)]), flush=True)
    return int(bool(failed))


def run(part: Part, folder: Path) -> str:
    """What came of a part. Its processes end with it."""
    folder.mkdir(parents=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", *part.command(), str(folder.resolve())],
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


def measure(what: str, out: Path, scale: str, seconds: float) -> None:
    """The benchmarks of `alibi bench` without their command line, which needs typer; each call has its share of the time."""
    if scale == "smoke":
        quick_interpreter.prepare()
    end, calls = time.perf_counter() + seconds, CALLS[what]
    for number, (share, options) in enumerate(calls):
        limit = (end - time.perf_counter()) * share / sum(share for share, _ in calls[number:])
        given = {**options, **(REHEARSED[what] if scale == "smoke" else {"device": "cuda"})}
        function = benchmark(what)
        if function is None:
            print(f"{what} is left out: transformers cannot be imported", flush=True)
        elif what == "models":
            function(out, **given, seconds=limit / 20)
        else:
            function(out, **given, seconds=0.5, repeats=7, limit=max(limit, 1.0))


def benchmark(what: str) -> Callable[..., object] | None:
    """The function of a benchmark; None if models need a package that is missing."""
    from alibi_lab.measure.attention import attention
    from alibi_lab.measure.decoding import decoding

    if what != "models":
        return decoding if what == "decoding" else attention
    try:
        from alibi_lab.measure.models import models
    except ImportError:
        return None
    return models


# Shares of the time and options of the calls of each part; the first ones matter most.
CALLS: Mapping[str, Sequence[tuple[float, Mapping[str, object]]]] = {
    "attention": (
        (2.0, {"backend": "fused", "graphs": True, "kernels": True, "lengths": (2048, 16384, 131072)}),
        (1.0, {"backend": "fused", "inputs": ("gates-4-U-8",), "lengths": (8192,), "graphs": True}),
        (
            1.0,
            {
                "backend": "fused",
                "inputs": ("masked",),
                "lengths": (512, 2048, 8192),
                "shape": ((12, 64),),
                "graphs": True,
            },
        ),
        (1.0, {"backend": "fused", "lengths": LENGTHS, "shape": ((32, 64),)}),
    ),
    "decoding": ((1.0, {"backend": "fused", "lengths": (2048, 16384, 131072)}),),
    "models": (
        (
            1.0,
            {"models": ("bloom",), "parts": ("pass", "step"), "layers": 8, "width": 2048, "precisions": ("bfloat16",)},
        ),
        (1.0, {"models": ("encoder",), "precisions": ("bfloat16", "int8", "float8"), "lengths": (512, 8192)}),
    ),
    "jax": ((1.0, {"framework": "jax", "lengths": (2048, 16384, 131072)}),),
}
# What a rehearsal on a CPU, in Triton's interpreter, changes.
TINY: Mapping[str, object] = {"device": "cpu", "dtype": "float32", "lengths": (70,), "shape": ((2, 16),)}
REHEARSED: Mapping[str, Mapping[str, object]] = {
    "attention": TINY,
    "decoding": TINY,
    "models": {"device": "cpu", "lengths": (70,), "layers": 1, "width": 64, "rounds": 1, "precisions": ("float32",)},
    "jax": TINY,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", choices=PARTS, default="full")
    parser.add_argument("--only", nargs="+", choices=PARTS["full"], default=(), help="the parts to run")
    parser.add_argument("--seconds", type=float, help="shared among the parts")
    parser.add_argument(
        "--measure", choices=("attention", "decoding", "models", "jax"), help="only this, in this process"
    )
    asked = parser.parse_args()
    if asked.measure:
        sys.exit(measure(asked.measure, asked.out, asked.scale, asked.seconds or 600.0))
    sys.exit(everything(asked.out, chosen(asked.scale, asked.only, asked.seconds)))
