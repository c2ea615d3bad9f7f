"""Compiles our Triton kernels without a GPU, and reads the compiler's output; a standalone program.

    python tests/support/interpreter/offline_compile.py sm_90 [sm_80 …]          the figures, as JSON
    python tests/support/interpreter/offline_compile.py --record results          saved as a record, for all targets

It must not run where TRITON_INTERPRET is set: a process that interprets cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, Shape, may_describe, may_fix, tile_shape
from alibi_attn.attention.backends.fused.kernels.append import append_kernel, append_to_rings_kernel
from alibi_attn.attention.backends.fused.kernels.arguments import (
    Call,
    Certificate,
    KeyBias,
    Labels,
    Masks,
    Norms,
    Plan,
    QueryOffset,
    Rows,
    Slopes,
    Survey,
    Table,
    Tiling,
    Visited,
    Visitors,
)
from alibi_attn.attention.backends.fused.kernels.backward import query_kernel
from alibi_attn.attention.backends.fused.kernels.backward_keys import key_kernel
from alibi_attn.attention.backends.fused.kernels.certificate import norms_kernel, survey_kernel
from alibi_attn.attention.backends.fused.kernels.decode import decode_kernel, merge_kernel
from alibi_attn.attention.backends.fused.kernels.forward import forward_kernel, table_forward_kernel
from alibi_attn.attention.backends.fused.kernels.gates import scan_kernel, suffix_kernel
from alibi_attn.attention.backends.fused.kernels.key_bias import split_kernel
from alibi_attn.attention.backends.fused.kernels.masks import labels_kernel, spread_kernel
from alibi_attn.attention.backends.fused.kernels.plan import plan_kernel, visitors_kernel
from alibi_attn.attention.backends.fused.kernels.reach import reach_kernel
from alibi_attn.attention.backends.fused.kernels.table_diagonals import diagonal_kernel
from alibi_attn.attention.backends.fused.table import widths
from alibi_attn.attention.certificate.constants import TILE
from alibi_lab import records

KERNELS = {"forward": forward_kernel, "query": query_kernel, "key": key_kernel, "decode": decode_kernel}
OF_TABLES = {"forward": table_forward_kernel, "query": query_kernel, "key": key_kernel, "diagonal": diagonal_kernel}
OF_TABLES = {f"{name}, table": kernel for name, kernel in OF_TABLES.items()}
BEFORE = {
    "norms": norms_kernel,
    "survey": survey_kernel,
    "reach": reach_kernel,
    "plan": plan_kernel,
    "visitors": visitors_kernel,
}
BEFORE |= {"merge": merge_kernel, "labels": labels_kernel, "spread": spread_kernel}
BEFORE |= {"split": split_kernel, "scan": scan_kernel, "suffix": suffix_kernel}  # of key biases and gates
BEFORE |= {"append": append_kernel, "rings": append_to_rings_kernel}  # of static caches
WITH_TILES = ("norms", "reach")  # the others hold small integers, for which every device has room
ALONE = ("plan", "merge", "labels", "append", "rings")  # launched with one warp, "labels" unless it splits a bias
ITS_SHAPE = Shape(queries=64, keys=64, warps=4, stages=3)
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LARGE = ("sm_90", "sm_100")
# Triton's types for the arguments of a plain causal call; None marks the absent ones.
ROWS, LABELS = Rows("*bf16", "i32", "i32", "i32"), Labels("*i64", "*i64", "*i32", "*i32")
TYPES = dict.fromkeys(("Q", "K", "V", "OUT", "DOUT", "DQ", "DK", "DV"), ROWS)
TYPES |= dict.fromkeys(
    ("LSE", "DLSE", "DELTA", "SHIFTED", "DSLOPES", "NORMS", "OUTS", "LSES", "GIVEN_LSE", "ALLOWANCE"), "*fp32"
)
TYPES |= dict.fromkeys(("ARRIVED", "CANDIDATES", "ORDER", "FULL_BLOCKS", "FULL_TILES", "MEASURED", "ONLINE"), "*i32")
TYPES |= dict.fromkeys(("SUMS", "FIRST_SEEN", "KEY_ORDER"), None)
TYPES |= dict.fromkeys(("queries", "keys"), LABELS)
TYPES |= dict.fromkeys(("BIAS", "GATES", "OWN"), Rows("*fp32", "i32", "i32", "i32"))
TYPES |= dict.fromkeys(("KEY_BIAS", "QUERY_BIAS", "DKEY", "DQUERY"), "*fp64")
TYPES |= dict.fromkeys(("KEYS", "VALUES"), ROWS) | dict.fromkeys(("KEY_NORMS", "VALUE_NORMS"), "*fp64")
TYPES |= dict.fromkeys(("LENGTH", "FIRST", "RINGS"), "*i64")
TYPES |= {"QUERY_START": "*i64", "DGATES": "*fp32", "split": KeyBias("*fp32", "*fp32", "*fp32", "*fp32")}
TYPES |= {
    "ALLOWED": None,
    "COSTS": "*i64",
    "nats_of_tolerance": "fp32",
    "visited": Visited("*i32", "*i32", None, "i32"),
    "visitors": Visitors("*i32", "*i32", None, "i32"),
    "certificate": Certificate("*i32", "*i32", "*fp32", "*i64", "*i32"),
    "plan": Plan("*i32", "*i32", "*i32", "*i32", "i32", None, "*i32", "*i32"),
    "norms": Norms("*fp32", "*fp32", None, None, "i32"),
    **dict.fromkeys(("found", "surveyed"), Survey("*fp32", "*i32", "*i32", "*fp32")),
}
TYPES["call"] = Call(
    Slopes("*fp32", "i32"),
    None,
    QueryOffset(None, "i32", "i32"),
    Masks(None, None, None),
    "fp32",
    None,
    None,
    None,
    "i32",
    "i32",
    "i32",
    "i32",
    "i32",
)
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def figures(kernel: str, target: str, head_dim: int, *, biased: bool = False) -> dict[str, int]:
    """Figures of one kernel: bf16, causal, no masks, gradients of slopes and lse; with `biased` also of a key bias."""
    shape = ITS_SHAPE._replace(warps=1) if kernel in ALONE and not biased else ITS_SHAPE
    if kernel in KERNELS:
        described, large = _is_described(kernel, target, head_dim, biased=biased), target in LARGE
        shape = tile_shape(kernel, torch.bfloat16, head_dim, large=large, described=described)
    if kernel in OF_TABLES:
        shape = _shape_with_table(kernel, head_dim)
    compiled = triton.compile(
        _source(kernel, target, head_dim, shape, biased),
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
    hearts = _hearts(executed)
    if kernel != "query":  # which has the loops of `over_tiles` twice
        hearts.sort(key=len)
    loop, online = hearts[0] if hearts else [], []
    if kernel == "forward" and not biased and may_fix(torch.bfloat16, head_dim):
        online = hearts[1]
    return {
        "loop_instructions": len(loop),
        "online_instructions": len(online),
        "instructions": len(executed),
        "instructions_per_score": round(len(loop) * 32 * shape.warps / (shape.queries * shape.keys), 1),
        "spills_in_loop": sum(name in ("LDL", "STL") for name in loop + online),
        "async_loads": len(re.findall(r"cp\.async\.(?:c|bulk\.tensor)", code)),
        "wgmma": code.count("wgmma.mma_async"),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|\bmma\.sync|tcgen05\.mma", code)),
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "shared_bytes": compiled.metadata.shared,
    }


def every_figure(targets: list[str]) -> dict[str, dict[str, int]]:
    """Figures by name, "sm_90/forward/D=64"; "sm_90-wide" has D = 128, "sm_90-biased" a key bias, "sm_90-few" three kernels,
    "sm_90-table" a table.
    """
    found = {}
    for target in targets:
        if target == "sm_90-biased":
            for kernel in (*KERNELS, "reach", "labels"):
                found[f"sm_90/{kernel}, biased/D=64"] = figures(kernel, "sm_90", 64, biased=True)
        elif target == "sm_90-table":
            found |= {f"sm_90/{kernel}/D=64": figures(kernel, "sm_90", 64) for kernel in OF_TABLES}
        elif target == "sm_90-few":
            found |= {f"sm_90/{kernel}/D=64": figures(kernel, "sm_90", 64) for kernel in ("forward", "reach")}
            found["sm_90/forward, biased/D=64"] = figures("forward", "sm_90", 64, biased=True)
        elif target == "sm_90-wide":
            for kernel in (*KERNELS, "reach"):
                found[f"sm_90/{kernel}/D=128"] = figures(kernel, "sm_90", 128)
        else:
            for kernel in (*KERNELS, *(BEFORE if target == "sm_90" else WITH_TILES)):
                found[f"{target}/{kernel}/D=64"] = figures(kernel, target, 64)
    return found


def _shape_with_table(kernel: str, head_dim: int) -> Shape:
    found = widths(torch.empty(1, 1, 1, head_dim, dtype=torch.bfloat16))  # not on a device: as on a large one
    side = found.diagonal, found.diagonal
    queries, keys = {"key, table": found.keys, "diagonal, table": side}.get(kernel, found.rows)
    return Shape(queries, keys, warps=4, stages=2)


def record(folder: Path) -> Path:
    found = every_figure([*TARGETS, "sm_90-wide"])
    columns = sorted({name for row in found.values() for name in row})
    curve = {"kernel": list(found)} | {name: [row.get(name) for row in found.values()] for name in columns}
    made = records.make(
        "compilation",
        "fused/bf16",
        config={"dtype": "bfloat16", "causal": True, "triton": triton.__version__},
        metrics={"spilled_sm_90": sum(row["spilled"] for name, row in found.items() if name.startswith("sm_90"))},
        curves={"kernels": curve},
    )
    return records.save(made, folder)


def _is_described(kernel: str, target: str, head_dim: int, *, biased: bool) -> bool:
    may = may_describe(torch.bfloat16, head_dim, large=target in LARGE)
    return may and (kernel == "key" or (kernel == "query" and target == "sm_90" and not biased))


def _source(kernel: str, target: str, head_dim: int, shape: Shape, biased: bool) -> ASTSource:
    function = (KERNELS | OF_TABLES | BEFORE)[kernel]
    is_described = _is_described(kernel, target, head_dim, biased=biased)
    precision = "tf32x3" if TARGETS[target].backend == "cuda" else "ieee"
    unit = TILE if kernel in ("query", "key") else PLAN_ROWS
    tiling = Tiling(head_dim, shape.queries, shape.keys, PLAN_ROWS, unit, True, precision, is_described)
    constants = {
        **dict.fromkeys(() if kernel in KERNELS | OF_TABLES else ("D", "DK", "DV"), head_dim),
        "ROWS": PLAN_ROWS,
        "CAUSAL": True,
        "WIDTH": 16 if kernel in ("spread", "visitors") else 64,
        "SPAN": 64,
        "BOTH_SIDES": False,
        "PLAN_WIDTH": 64,
        "BLOCKS": 64,
        "OF_WIDTH": 64,
        "SLOTS": 64,
        "PARTS": 2,
        "BIAS_ROWS": PLAN_ROWS,
        "VALUES": True,
        "HIDDEN": biased,
        "SHARED": False,
        "KEY_RULE": True,
        "FLOOR": -(2.0**20),
        "STEP": 2.0**10,
    }
    types = TYPES | {
        "ALLOWED": "*i32" if kernel == "spread" else None,
        "FIRST_SEEN": "*i32" if kernel == "spread" else None,
    }
    if kernel in ("append", "rings"):
        constants["N"] = 1
        del constants["VALUES"]
    if kernel == "rings":
        types |= dict.fromkeys(("KEYS", "VALUES"), "*bf16")
    if kernel in OF_TABLES:
        types |= {"SUMS": "*fp32" if kernel.startswith("diagonal") else None, "DSLOPES": None, "SHIFTED": None}
        types["call"] = TYPES["call"]._replace(table=Table("*fp32", "i32", "i32"))
    if biased:
        types["call"] = TYPES["call"]._replace(key_bias=KeyBias("*fp32", "*fp32", "*fp32", "*fp32"))
        types["visited"], types["visitors"] = (
            Visited("*i32", "*i32", "*i32", "i32"),
            Visitors("*i32", "*i32", "*i32", "i32"),
        )
        types |= {
            "SUMS": "*fp32",
            "NORMS": None,
            "ONLINE": None,
            "GIVEN_LSE": None,
            "ALLOWED": "*i32",
            "FIRST_SEEN": "*i32",
        }
        types["norms"] = TYPES["norms"]._replace(sums="*fp32")
    if is_described:
        names, rows = (("Q", "DOUT"), shape.queries) if kernel == "key" else (("K", "V"), shape.keys)
        types |= dict.fromkeys(names, f"tensordesc<bf16[1,1,{rows},{head_dim}]>")
    signature: dict[str, Any] = {}
    places: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def described(asked: Any, path: tuple[int, ...], in_rows: bool) -> Any:
        """The type of one argument, or of the elements of a tuple."""
        if isinstance(asked, tuple):
            each = [described(x, (*path, at), isinstance(asked, Rows)) for at, x in enumerate(asked)]
            return type(asked)(*each)
        if asked is None:
            places[path] = None
            return "constexpr"
        if asked.startswith("*") or in_rows:
            aligned[path] = [["tt.divisibility", 16]]
        return asked

    for at, name in enumerate(function.arg_names):
        if name == "C":
            signature[name] = Tiling(*["constexpr"] * len(tiling))
            places |= {(at, place): value for place, value in enumerate(tiling)}
        elif name in constants:
            signature[name], places[at,] = "constexpr", constants[name]
        else:
            signature[name] = described(types.get(name, "i32"), (at,), False)
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
    """(address, instruction) of every instruction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", said)]


def _hearts(code: list[tuple[int, str]]) -> list[list[str]]:
    """Instruction names of the innermost loops that multiply matrices. The shortest is that over full tiles; in forward, where
    softmax is not online, and the next shortest that where it is.
    """
    place = {address: at for at, (address, _) in enumerate(code)}
    names = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in code]
    loops = []
    for at, (address, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append((place[int(jump[1], 16)], at))
    hearts = []
    for start, end in loops:
        loop = names[start : end + 1]
        alone = not any(start <= other and last < end for other, last in loops if (other, last) != (start, end))
        if alone and any(name in ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA") for name in loop):
            hearts.append(loop)
    return hearts


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    if sys.argv[1] == "--record":
        print(record(Path(sys.argv[2])))
    else:
        print(json.dumps(every_figure(sys.argv[1:])))
