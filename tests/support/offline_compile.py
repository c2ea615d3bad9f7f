"""Compile our Triton kernels for GPUs that are not there, and read what the compiler did; a program of its own.

    python tests/support/offline_compile.py sm_90 [sm_80 …]          the figures, as JSON
    python tests/support/offline_compile.py --record results          kept as a record, for all targets

It must not run where TRITON_INTERPRET is set: a process that interprets cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alibi_attn import records
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, Shape, tile_shape
from alibi_attn.attention.backends.fused.kernels.backward import key_kernel, query_kernel
from alibi_attn.attention.backends.fused.kernels.certificate import lengths_kernel, outliers_kernel, reach_kernel
from alibi_attn.attention.backends.fused.kernels.decode import decode_kernel, merge_kernel
from alibi_attn.attention.backends.fused.kernels.forward import forward_kernel
from alibi_attn.attention.backends.fused.kernels.masks import allowed_kernel, labels_kernel, open_kernel, runs_kernel
from alibi_attn.attention.backends.fused.kernels.plan import asked_kernel, plan_kernel, shared_plan_kernel
from alibi_attn.attention.certificate.constants import KEPT

KERNELS = {"forward": forward_kernel, "query": query_kernel, "key": key_kernel, "decode": decode_kernel}
BEFORE = {"lengths": lengths_kernel, "outliers": outliers_kernel, "reach": reach_kernel, "plan": plan_kernel}
BEFORE |= {"shared_plan": shared_plan_kernel, "asked": asked_kernel, "merge": merge_kernel}
BEFORE |= {"labels": labels_kernel, "runs": runs_kernel, "open": open_kernel, "allowed": allowed_kernel}
WITH_TILES = ("lengths", "reach")  # the others hold small integers, of which no device has too few
ALONE = ("shared_plan", "merge", "labels")  # launched with one warp
ITS_SHAPE = Shape(queries=64, keys=64, warps=4, stages=3)
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIMS = {"sm_90": (64, 128)}
TENSORS = {"Q", "K", "V", "OUT", "DOUT", "DQ", "DK", "DV"}
INTEGERS = dict.fromkeys(
    ("PLAN", "PIN_TABLE", "OPEN", "OPEN_TO", "COUNT", "ASKED", "REACH", "CHOSEN", "BEFORE"), "*i32"
)
INTEGERS |= dict.fromkeys(
    ("ALLOWED", "BESIDES", "PINNED", "WEIGHT", "FOUND", "WHOLE", "OF_WHOLE", "EDGES", "RUNS"), "*i32"
)
INTEGERS |= dict.fromkeys(("FIRST", "SEED", "QUERY_SEGMENTS", "KEY_SEGMENTS", "SEGMENTS", "ORDER"), "*i64")
INTEGERS |= dict.fromkeys(("LEAST", "MOST", "OF_LEAST", "OF_MOST"), "*i64") | {"FIRST_SEEN": "*i32"}
INTEGERS |= {"MASK": "*i8"} | dict.fromkeys(("KNOWN_KEYS", "KNOWN_VALUES"), "*fp64")
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def figures(kernel: str, target: str, head_dim: int) -> dict[str, int]:
    """What became of one kernel in bf16, causal, without masks."""
    shape = ITS_SHAPE._replace(warps=1) if kernel in ALONE else ITS_SHAPE
    if kernel in KERNELS:
        shape = tile_shape(kernel, torch.bfloat16, head_dim, large=target in ("sm_90", "sm_100"))
    compiled = triton.compile(
        _source(kernel, target, head_dim, shape),
        target=TARGETS[target],
        options={"num_warps": shape.warps, "num_stages": shape.stages},
    )
    if TARGETS[target].backend != "cuda":
        code = compiled.asm["amdgcn"]
        spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
        return {
            "matrix_instructions": len(re.findall(r"\bv_mfma", code)),
            "spilled": int(spilled[1]),
            "shared_bytes": compiled.metadata.shared,
        }
    code = compiled.asm["ptx"]
    used, executed = _resources(compiled.asm["cubin"]), _machine_code(compiled.asm["cubin"])
    loop = _heart(executed)
    return {
        "loop_instructions": len(loop),
        "instructions": len(executed),
        "instructions_per_score": round(len(loop) * 32 * shape.warps / (shape.queries * shape.keys), 1),
        "spills_in_loop": sum(name in ("LDL", "STL") for name in loop),
        "async_loads": code.count("cp.async.c"),
        "wgmma": code.count("wgmma.mma_async"),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|\bmma\.sync|tcgen05\.mma", code)),
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "shared_bytes": compiled.metadata.shared,
    }


def every_figure(targets: list[str]) -> dict[str, dict[str, int]]:
    """By name, "sm_90/forward/D=64"."""
    return {
        f"{target}/{kernel}/D={head_dim}": figures(kernel, target, head_dim)
        for target in targets
        for kernel in [*KERNELS, *(BEFORE if target == "sm_90" else WITH_TILES)]
        for head_dim in (HEAD_DIMS.get(target, (64,)) if kernel in (*KERNELS, "reach") else (64,))
    }


def record(folder: Path) -> Path:
    found = every_figure(list(TARGETS))
    columns = sorted({name for row in found.values() for name in row})
    curve = {"kernel": list(found)} | {name: [row.get(name) for row in found.values()] for name in columns}
    made = records.make(
        "compilation", "fused/bf16", config={"dtype": "bfloat16", "causal": True, "triton": triton.__version__},
        metrics={"spilled_sm_90": sum(row["spilled"] for name, row in found.items() if name.startswith("sm_90"))},
        curves={"kernels": curve},
    )  # fmt: skip
    return records.save(made, folder)


def _source(kernel: str, target: str, head_dim: int, shape: Shape) -> ASTSource:
    function = (KERNELS | BEFORE)[kernel]
    rows = shape.queries if kernel == "decode" else PLAN_ROWS
    constants = {
        "D": head_dim, "DP": head_dim, "BM": shape.queries, "BN": shape.keys, "ROWS": rows, "TILE": 64, "CAUSAL": True,
        "PRECISION": "tf32x3" if TARGETS[target].backend == "cuda" else "ieee", "HAS_DLSE": True, "SLOPES_WANTED": True,
        "KEPT": KEPT, "WIDTH": 64, "BLOCKS": 64, "OF_WIDTH": 64, "SLOTS": 64, "PARTS": 1, "OF_PARTS": 2, "KEYS": True,
        "HAS_NORMS": True,
    }  # fmt: skip
    constants |= dict.fromkeys(
        (
            "HAS_RIGHT",
            "HAS_WINDOW",
            "HAS_SEGMENTS",
            "HAS_DROPOUT",
            "HAS_MASK",
            "HAS_OPEN",
            "HAS_KNOWN",
            "HAS_ALLOWED",
            "UNLIMITED",
            "BOTH_SIDES",
            "COUNTS",
        ),
        False,
    )
    signature, aligned = {}, {}
    for at, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = (name.isupper() and len(name) > 2) or name in TENSORS  # B, BK, H, G, T, S and N are numbers
        if name in TENSORS:
            signature[name] = "*bf16"
        elif pointer:
            # What is left over are results, norms and slopes in fp32.
            signature[name] = INTEGERS.get(name, "*fp32")
        else:
            signature[name] = "fp32" if name in ("scale", "dropout", "ratio", "nats_of_tolerance") else "i32"
        if pointer or re.fullmatch(r"(q|k|v|o|do|dq|dk|dv)_[bhts]", name):
            aligned[(at,)] = [["tt.divisibility", 16]]
    places = {
        (function.arg_names.index(name),): value for name, value in constants.items() if name in function.arg_names
    }
    return ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)


def _resources(cubin: bytes) -> re.Match[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return found


def _machine_code(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of all that a thread executes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", said)]


def _heart(code: list[tuple[int, str]]) -> list[str]:
    """The names of the instructions in the first loop that multiplies matrices and holds no other; empty where there is none."""
    place = {address: at for at, (address, _) in enumerate(code)}
    names = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in code]
    loops = []
    for at, (address, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append((place[int(jump[1], 16)], at))
    for start, end in sorted(loops):
        loop = names[start : end + 1]
        alone = not any(start <= other and last < end for other, last in loops if (other, last) != (start, end))
        if alone and any(name in ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA") for name in loop):
            return loop
    return []


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    if sys.argv[1] == "--record":
        print(record(Path(sys.argv[2])))
    else:
        print(json.dumps(every_figure(sys.argv[1:])))
