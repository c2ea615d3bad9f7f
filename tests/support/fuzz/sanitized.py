"""Runs the C++ kernels with the address and undefined-behavior sanitizers: the conformance cases, and random calls.

    python tests/support/fuzz/sanitized.py        # `make sanitize`: every case, and 300 draws of the fuzz
    python tests/support/fuzz/sanitized.py 5000   # 5000 draws

The kernels are compiled separately (minutes, kept in the user's cache). This program then restarts itself with the
sanitizers' libraries preloaded, which a Python built without them requires. It first checks that reading one key too
many is detected. The first wrong access or undefined operation stops it, with a message that names the place; so does a
wrong number.
"""

import ctypes
import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import answer, assert_exact
from differential_arrays import arrays
from differential_calls import draw
from differential_checks import answer as answer_call
from differential_fuzz import fuzz
from toeplitz_calls import check
from toeplitz_calls import draw as draw_with_a_table

from alibi_attn.attention.backends.native import backend, build, compiling
from alibi_attn.attention.backends.native.levels import NATIVE
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.operators.operator import Spec

SANITIZERS = "address,undefined,float-cast-overflow"
# Not -O3, which only makes compiling these checks slower.
FLAGS = ("-O1", "-g1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all")
LIBRARIES = ("libasan.so", "libubsan.so")
DRAWS = 300
OPTIONS = {  # Python does not free all memory at exit
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments[:1] == ["inside"]:
        return _inside(*arguments[1:])
    draws = arguments[0] if arguments else str(DRAWS)
    print(f"compiling with -fsanitize={SANITIZERS} unless that is in the cache, which takes minutes", flush=True)
    found = _begin_anew("inside", "a key too many", capture_output=True)
    if found.returncode == 0 or b"AddressSanitizer: heap-buffer-overflow" not in found.stderr:
        print(found.stdout.decode() + found.stderr.decode())
        print("a read beyond the last key is not detected: the kernels do not run under the sanitizers here")
        return 1
    print("a read beyond the last key is detected", flush=True)
    return _begin_anew("inside", "all", draws).returncode


def _begin_anew(*arguments: str, **options: bool) -> subprocess.CompletedProcess[bytes]:
    command = compiling.compiler(os.environ.get("CXX"))
    libraries = [
        subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, check=True).stdout.decode().strip()
        for name in LIBRARIES
    ]
    environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(libraries), "OMP_WAIT_POLICY": "passive"}
    environment["CXX"] = " ".join(["env", "-u", "LD_PRELOAD", *command])  # the compiler itself is not checked
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False, **options)


def _inside(what: str, draws: str = "0") -> int:
    build.FLAGS = (*(flag for flag in build.FLAGS if not flag.startswith("-O")), *FLAGS)
    compiling.run = functools.partial(compiling.run, timeout_s=None)
    build.library = functools.partial(build.library, NATIVE)  # compiled here, not loaded from a wheel
    reason = build.why_not()
    if reason is not None:
        print(reason)
        return 1
    if what == "a key too many":
        read_a_key_too_many()
        return 0
    warnings.simplefilter("error")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for case in (*CASES, *KEY_BIASES):
                conform(case, dtype)
        print(f"{len(CASES) + len(KEY_BIASES)} cases in {len(DTYPES)} dtypes with {threads} threads: right", flush=True)
    for seed in range(int(draws) // 3):
        check(draw_with_a_table(seed), "native")
    print(f"{int(draws) // 3} random calls with a table of distances: right", flush=True)
    failures: list[tuple[int, str]] = []
    for seed in range(int(draws)):
        call = draw(seed)
        if (
            call.is_huge
        ):  # some sums are finite only with FMA, when a product overflows fp32; this build may not use FMA
            answer_call(call, arrays(call), backend="native")
        else:
            failures += fuzz(["native"], range(seed, seed + 1))["native"].failures
    print(f"{draws} random calls: {len(failures)} wrong")
    for seed, words in failures:
        print(f"WRONG native seed {seed}: {words}")
    return int(bool(failures))


def conform(case: Case, dtype: torch.dtype) -> None:
    """Asserts that output, lse and gradients of a case are right."""
    assert_exact(case, dtype, answer(case, dtype, backend="native"), tolerance=torch.finfo(dtype).eps / 32)


def read_a_key_too_many() -> None:
    """Makes a call whose key length is one larger than the tensors have."""
    query, key, value = (torch.randn(1, 1, 100, 16) for _ in range(3))
    longer = torch.randn(1, 1, 101, 16)
    spec: Spec = make_spec(query, longer, longer, [0.0], causal=False)
    rows = {"query": query, "key": key, "value": value, "output": torch.empty_like(query)}
    saved = backend._empty_saved(query, longer)
    arrays = {"lse": torch.empty(1, 1, 100, dtype=torch.float64), "rows": saved.rows, "visited": saved.visited}
    call, _alive = backend.call_of(spec, rows, arrays)
    build.library().alibi_forward_float32(ctypes.byref(call))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
