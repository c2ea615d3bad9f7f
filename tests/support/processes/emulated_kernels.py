"""Runs the C++ kernels of other systems: compiled by zig, run by qemu or Wine, called like this process's library.

`Emulated` has the functions of the loaded library. It sends the arguments of each call to `kernels_driver.cpp` and writes the
results into the tensors, so that every test of the kernels can run through it. Needs `ziglang` (PyPI) and
Debian's qemu-user-static or wine.
"""

import ctypes
import functools
import importlib.util
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from alibi_attn.attention.backends.native import build, decoding
from alibi_attn.attention.backends.native.visited import numbers_of_visited
from alibi_attn.attention.certificate.constants import TILE

DRIVER = Path(__file__).parent / "kernels_driver.cpp"
KERNELS = build.FUNCTIONS[:-1]  # the last one reports sizes
GREETING = "64s5q"


class Target(NamedTuple):
    """A system: zig's name for it, further flags, the program that runs it, and what the kernels must report."""

    name: str
    zig: str
    flags: tuple[str, ...]
    runs: str
    words: str


TARGETS = (
    Target("aarch64-linux", "aarch64-linux-musl", (), "qemu-aarch64-static", "NEON"),
    Target("x86_64-windows", "x86_64-windows-gnu", ("-march=x86_64_v3",), "wine", "AVX2"),
)
# By the names of `build.Call`: shape and bytes per number, 0 for the size of the call's working dtype.
ARRAYS = {
    "slopes": ("BH", 0), "right_slopes": ("BH", 0), "first": ("B", 8), "key_mask": ("BS", 1), "query_segments": ("BT", 4),
    "key_segments": ("BS", 4), "key_bias": ("BHS", 8), "lse": ("BHT", 8), "grad_lse": ("BHT", 0),
    "key_bias_grad": ("BHS", 8), "query_bias_grad": ("BHT", 8), "start": ("B", 8), "stop": ("B", 8),
}  # fmt: skip
KEYS = {"key", "value", "key_grad", "value_grad"}
RESULTS = {
    "output", "query_grad", "key_grad", "value_grad", "lse", "rows", "slope_grads", "key_bias_grad", "query_bias_grad",
    "visited", "table_grads", "fine", "norms", "y",
}  # fmt: skip


def why_not(target: Target) -> str | None:
    """Returns why this machine cannot compile for the system or run it, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return "ziglang is not installed (pip install ziglang)"
    return None if shutil.which(target.runs) else f"{target.runs} is not installed"


def compiled(target: Target, folder: Path) -> Path:
    """Compiles the driver and the kernels into one program."""
    program = folder / f"kernels-{target.name}.exe"
    sources = [str(DRIVER), *(str(build.FOLDER / source) for source in build.SOURCES)]
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target.zig, *target.flags]
    flags = [*build.FLAGS, "-O2", f"-I{build.FOLDER}"]
    subprocess.run([*zig, *flags, *sources, "-o", str(program)], check=True, timeout=3000)
    return program


class Emulated:
    """A program of `compiled`, with the functions of the loaded library."""

    def __init__(self, target: Target, program: Path) -> None:
        environment = os.environ | {"WINEDEBUG": "-all", "WINEPREFIX": str(program.parent / "wine")}
        self._process = subprocess.Popen(
            [target.runs, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        words, multiplies, call_bytes, *sizes = struct.unpack(GREETING, self._read(struct.calcsize(GREETING)))
        self.calls, self._sizes, self._name = 0, sizes, str(program)
        self.alibi_instructions = lambda: words.rstrip(b"\0")
        self.alibi_multiplies_bf16 = lambda: multiplies
        assert call_bytes == ctypes.sizeof(build.Call)
        for index, name in enumerate(KERNELS):
            setattr(self, name, functools.partial(self._call, index, 8 if name.endswith("float64") else 4))

    def alibi_decoding_bytes(self, sizes: ctypes.Array[ctypes.c_int64]) -> None:
        sizes[:] = self._sizes

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _read(self, count: int) -> bytes:
        data = self._process.stdout.read(count)
        assert len(data) == count, f"the emulated program ended: {self._process.wait(60)}"
        return data

    def _call(self, index: int, work: int, reference: object) -> None:
        call = reference._obj
        narrow = "16" in KERNELS[index] or getattr(call, "bf16", 0)
        arrays = list(arrays_of(call, work, 2 if narrow else work))
        listed = [
            struct.pack("3q", getattr(type(call), name).offset, size, name in RESULTS) for name, _, size in arrays
        ]
        self._process.stdin.write(
            struct.pack("3q", index, ctypes.sizeof(call), len(arrays)) + bytes(call) + b"".join(listed)
        )
        for _, address, size in arrays:
            self._process.stdin.write(ctypes.string_at(address, size))
        self._process.stdin.flush()
        for name, address, size in arrays:
            if name in RESULTS:
                ctypes.memmove(address, self._read(size), size)
        self.calls += 1


def arrays_of(call: ctypes.Structure, work: int, stored: int):
    """(field, address, bytes) of every array; numbers have `work` bytes, in queries, keys and values `stored`."""
    for name, kind in call._fields_:
        value = getattr(call, name)
        if kind is build.Rows:
            address, size = value.at, (stored if not name.endswith("_grad") else work) * _numbers(call, name, value)
        elif kind is ctypes.c_void_p:
            address, size = value, _bytes(call, name, work, stored)
        elif kind not in (ctypes.c_int64, ctypes.c_double):  # a typed pointer
            address = ctypes.cast(value, ctypes.c_void_p).value
            size = _bytes(call, name, work, stored)
        else:
            continue
        if address:
            yield name, address, size


def _numbers(call: ctypes.Structure, name: str, rows: build.Rows) -> int:
    if isinstance(call, decoding._NormsCall):
        heads, length = call.K, call.N * TILE
    else:
        heads, length = (call.K, call.S) if name in KEYS else (call.H, call.T)
    return max(0, (call.B - 1) * rows.sequence + (heads - 1) * rows.head + (length - 1) * rows.row + call.D)


def _bytes(call: ctypes.Structure, name: str, work: int, stored: int) -> int:
    if isinstance(call, decoding._LinearCall):
        inputs, outputs, rows = call.inputs, call.outputs, call.rows
        return stored * {"x": rows * inputs, "weight": inputs * outputs, "bias": outputs, "y": rows * outputs}[name]
    match name:
        case "fine":
            return 8
        case "norms":
            return 8 * call.B * call.K * call.N
        case "key_norms" | "value_norms":
            return 8 * ((call.B - 1) * call.norms_of_sequence + (call.K - 1) * call.norms_of_head + call.N)
        case "dropout_seed":
            return 32 * call.dropout_runs
        case "table" | "table_grads":
            return (work if name == "table" else 8) * call.H * call.distances
        case "visited":
            return 4 * call.B * numbers_of_visited(num_heads=call.H, num_kv_heads=call.K, query_len=call.T)
        case "rows":
            return work * 2 * call.B * call.H * call.T
        case "slope_grads":
            return 8 * 2 * call.B * call.H
    shape, size = ARRAYS[name]
    return (size or work) * math.prod(getattr(call, axis) for axis in shape)
