"""Runs the C++ kernels of other systems: compiled by zig, run by qemu or Wine, called like this process's library.

`Emulated` has the functions of the loaded library. It sends the arguments of each call to `kernels_driver.cpp` and writes the
results into the tensors, so that every test of the kernels can run through it. Needs `ziglang` (PyPI) and
Debian's qemu-user-static or wine64.
"""

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import shutil
import struct
import subprocess
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from alibi_attn.attention.backends.native import build, decoder_layers, decoding
from alibi_attn.attention.backends.native.levels import OF_MACHINE
from alibi_attn.attention.backends.native.visited import numbers_of_visited
from alibi_attn.attention.certificate.constants import TILE

TOLERANCE = {torch.float32: 2.0**-23 / 32, torch.float64: 2.0**-52 / 32, torch.bfloat16: 2.0**-7 / 32}  # eps / 32
DRIVER = Path(__file__).parent / "kernels_driver.cpp"
KERNELS = tuple(name for name in build.FUNCTIONS if not name.endswith("_bytes"))  # the others report sizes
GREETING = "64s7q"


class Target(NamedTuple):
    """A system: zig's name for it, further flags, names of the program that runs it, and what the kernels must report.

    With a `dtype`, all random calls and attacks are in it.
    """

    name: str
    zig: str
    flags: tuple[str, ...]
    runners: tuple[str, ...]
    words: str
    dtype: str | None = None


WINE = "wine64", "wine", "/usr/lib/wine/wine64"  # Debian's wine64 installs no command
ARM, QEMU = "aarch64-linux-musl", ("qemu-aarch64-static",)
ARM_BF16 = Target("aarch64-linux-bf16", ARM, OF_MACHINE["aarch64"][0].flags, QEMU, "NEON-BF16", "bfloat16")
TARGETS = (
    Target("aarch64-linux", ARM, (), QEMU, "NEON"),
    ARM_BF16,
    Target("x86_64-windows", "x86_64-windows-gnu", ("-march=x86_64_v3",), WINE, "AVX2"),
)
# By the names of `build.Call`: shape and bytes per number, 0 for the size of the call's working dtype.
ARRAYS = {
    "slopes": ("BH", 0),
    "right_slopes": ("BH", 0),
    "first": ("B", 8),
    "key_mask": ("BS", 1),
    "query_segments": ("BT", 4),
    "key_segments": ("BS", 4),
    "key_bias": ("BHS", 8),
    "query_numbers": ("BT", 8),
    "key_numbers": ("BS", 8),
    "query_points": ("BT", 24),
    "key_points": ("BS", 24),
    "lse": ("BHT", 8),
    "grad_lse": ("BHT", 0),
    "key_bias_grad": ("BHS", 8),
    "query_bias_grad": ("BHT", 8),
    "start": ("B", 8),
    "stop": ("B", 8),
}
KEYS = {"key", "value", "key_grad", "value_grad"}
RESULTS = ("output", "lse", "rows", "visited", "fine", "norms", "y", "cached")  # and the gradients


def why_not(target: Target) -> str | None:
    """Returns why this machine cannot compile for the system or run it, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return "ziglang is not installed (pip install ziglang)"
    return None if runner(target) else f"{target.runners[0]} is not installed"


def runner(target: Target) -> str | None:
    """The installed program that runs the system's programs, if any."""
    return next(filter(None, map(shutil.which, target.runners)), None)


def compiled(target: Target, folder: Path) -> Path:
    """Compiles the driver and the kernels into one program."""
    program = folder / f"kernels-{target.name}.exe"
    sources = [str(DRIVER), *(str(build.FOLDER / source) for source in build.SOURCES)]
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target.zig, *target.flags]
    flags = [*build.FLAGS, "-O2", f"-I{build.FOLDER}"]
    subprocess.run([*zig, *flags, *sources, "-o", str(program)], check=True, timeout=3000)
    return program


@contextlib.contextmanager
def emulating(target: Target, folder: Path) -> Iterator["Emulated"]:
    """Inside it every call of the native backend in this process runs on the other system; the program goes into `folder`."""
    kernels = Emulated(target, compiled(target, folder))
    assert kernels.alibi_instructions().decode() == target.words
    try:
        with unittest.mock.patch.object(build, "library", return_value=kernels):
            decoding.library_with.cache_clear()
            yield kernels
    finally:
        decoding.library_with.cache_clear()
        kernels.close()


class Emulated:
    """A program of `compiled`, with the functions of the loaded library."""

    def __init__(self, target: Target, program: Path) -> None:
        environment = os.environ | {"WINEDEBUG": "-all", "WINEPREFIX": str(program.parent / "wine")}
        self._process = subprocess.Popen(
            [runner(target), str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        words, multiplies, call_bytes, *sizes = struct.unpack(GREETING, self._read(struct.calcsize(GREETING)))
        self.calls, self._sizes, self._name = 0, sizes, str(program)
        self.alibi_instructions = lambda: words.rstrip(b"\0")
        self.alibi_multiplies_bf16 = lambda: multiplies
        assert call_bytes == ctypes.sizeof(build.Call)
        for index, name in enumerate(KERNELS):
            setattr(self, name, functools.partial(self._call, index, 8 if name.endswith("float64") else 4))

    def alibi_decoding_bytes(self, sizes: ctypes.Array[ctypes.c_int64]) -> None:
        sizes[:] = self._sizes[:3]

    def alibi_layers_bytes(self, sizes: ctypes.Array[ctypes.c_int64]) -> None:
        sizes[:] = self._sizes[3:]

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
        stored = 2 if "16" in KERNELS[index] or getattr(call, "bf16", 0) else work
        of_layers = isinstance(call, decoder_layers.LayersCall)
        arrays = list(arrays_of_layers(call, stored) if of_layers else arrays_of(call, work, stored))
        listed = [struct.pack("4q", x.parent, x.offset, x.size, x.is_result) for x in arrays]
        self._process.stdin.write(
            struct.pack("3q", index, ctypes.sizeof(call), len(arrays)) + bytes(call) + b"".join(listed)
        )
        for array in arrays:
            self._process.stdin.write(ctypes.string_at(array.address, array.size))
        self._process.stdin.flush()
        for array in arrays:
            if array.is_result:
                ctypes.memmove(array.address, self._read(array.size), array.size)
        self.calls += 1


class Array(NamedTuple):
    """An array of a call, of `size` bytes; its pointer is in the call's structure, or in an earlier array, the `parent`."""

    name: str
    offset: int
    address: int
    size: int
    parent: int = -1

    @property
    def is_result(self) -> bool:
        return self.name.endswith(("_grad", "_grads")) or self.name in RESULTS


def arrays_of(call: ctypes.Structure, work: int, stored: int) -> Iterator[Array]:
    """Every array of a call; numbers have `work` bytes, in queries, keys and values `stored`."""
    for name, kind in call._fields_:
        value = getattr(call, name)
        if kind is build.Rows:
            address, size = value.at, (stored if not name.endswith("_grad") else work) * _numbers(call, name, value)
        elif kind not in (ctypes.c_int64, ctypes.c_double):
            address, size = ctypes.cast(value, ctypes.c_void_p).value, _bytes(call, name, work, stored)
        else:
            continue
        if address:
            yield Array(name, getattr(type(call), name).offset, address, size)


def arrays_of_layers(call: decoder_layers.LayersCall, stored: int) -> Iterator[Array]:
    """Every array of a call of `decoder_layers.cpp`. Its layers are the first one, which has pointers to others."""
    states, layer_bytes = stored * call.B * call.T * call.E, ctypes.sizeof(decoder_layers.Layer)
    sizes = {"x": states, "y": states, "slopes": 4 * call.B * call.H}
    sizes |= {"start": 8 * call.B, "stop": 8 * call.B, "fine": 8}
    layers = ctypes.addressof(call.layer.contents)
    yield Array("layer", type(call).layer.offset, layers, call.layers * layer_bytes)
    for name, size in sizes.items():
        address = ctypes.cast(getattr(call, name), ctypes.c_void_p).value
        yield Array(name, getattr(type(call), name).offset, address, size)
    yield from _arrays_of_parts(call, call, -1, 0, stored)
    for n in range(call.layers):
        yield from _arrays_of_parts(call.layer[n], call, 0, n * layer_bytes, stored)


def _arrays_of_parts(
    owner: ctypes.Structure, call: decoder_layers.LayersCall, parent: int, start: int, stored: int
) -> Iterator[Array]:
    """The arrays of the norms, linear maps and caches in a structure, which is in `parent` at the offset `start`."""
    for name, kind in owner._fields_:
        part, at = getattr(owner, name), start + getattr(type(owner), name).offset
        if kind is build.Rows:  # the kernels append the new keys and values
            numbers = (call.B - 1) * part.sequence + (call.H - 1) * part.head + (call.S - 1) * part.row + call.D
            yield Array("cached", at, part.at, stored * numbers, parent)
        elif name.endswith("_norms") and part:
            numbers = (call.B - 1) * owner.norms_of_sequence + (call.H - 1) * owner.norms_of_head + owner.N
            yield Array(name, at, part, 8 * numbers, parent)
        elif kind in (decoder_layers.Norm, decoder_layers.Linear):
            for field, size in _sizes_of_weights(part, call.E, stored).items():
                if address := getattr(part, field):
                    yield Array(field, at + getattr(kind, field).offset, address, size, parent)


def _sizes_of_weights(part: ctypes.Structure, width: int, stored: int) -> dict[str, int]:
    if isinstance(part, decoder_layers.Norm):
        return {"weight": stored * width, "bias": stored * width}
    weight, bias = (1, 4) if part.scales else (stored, stored)  # bytes; int8 codes have a bias in fp32
    of_outputs = {"bias": bias * part.outputs, "scales": 4 * part.outputs, "sums": 4 * part.outputs}
    return {"weight": weight * part.inputs * part.outputs, **of_outputs}


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
