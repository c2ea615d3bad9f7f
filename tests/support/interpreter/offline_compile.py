"""Compiles our Triton kernels without a GPU, and reads the compiler's output; a standalone program.

    python tests/support/interpreter/offline_compile.py sm_90 [sm_80 …]          the figures, as JSON
    python tests/support/interpreter/offline_compile.py --record results          saved as a record, for all targets

The sources are what calls on an absent device ask Triton to compile (`alibi_lab/measure/absent_device.py`): bf16, causal, grouped
heads, gradients of everything. It must not run where TRITON_INTERPRET is set: a process that interprets cannot compile.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn.functional import logsigmoid
from triton import compiler
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.backends.fused import devices, launch, recording
from alibi_attn.attention.backends.fused.kernels.arguments import Tiling
from alibi_attn.nn import ALiBiAttention, KVCache
from alibi_lab import records
from alibi_lab.measure.absent_device import Launch, absent_device

KERNELS = ("forward", "query", "key", "decode")
BEFORE = (
    "norms",
    "survey",
    "reach",
    "plan",
    "visitors",
    "merge",
    "labels",
    "spread",
    "split",
    "scan",
    "suffix",
    "append",
)
WITH_TILES = ("norms", "reach")  # the others hold small integers, for which every device has room
# What is compiled, by what follows a target's name: kinds of calls, the size of a head, and their kernels.
WANTED = {
    "": (("plain", 64, (*KERNELS, *BEFORE, "append_to_rings")),),
    "wide": (("plain", 128, (*KERNELS, "reach")),),
    "biased": (("biased", 64, (*KERNELS, "reach", "labels")),),
    "few": (("plain", 64, ("forward", "reach")), ("biased", 64, ("forward",))),
    "table": (("table", 64, ("table_forward", "query", "key", "diagonal")),),
}
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
BATCH, HEADS, KEY_HEADS, LENGTH, FEW = 2, 4, 2, 4000, 3


def step(
    call: Callable[..., Any],
    queries: int,
    head_dim: int,
    *others: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    """A forward and backward pass, with gradients of the other tensors and of biases too."""
    shapes = (BATCH, HEADS, queries, head_dim), *((BATCH, KEY_HEADS, LENGTH, head_dim),) * 2
    arguments = [*(torch.zeros(shape, dtype=dtype) for shape in shapes), *others]
    leaves = [x.requires_grad_() for x in (*arguments, options.get("key_bias")) if x is not None]
    output, lse = call(*arguments, **options, return_lse=True)
    torch.autograd.grad((output, lse), leaves, (torch.zeros_like(output), torch.zeros_like(lse)))


@torch.no_grad()
def tokens(layer: ALiBiAttention) -> None:
    """Decoding steps with caches of a fixed capacity."""
    for cache in (KVCache(capacity=2048), layer.reach_cache(capacity=500)):
        for _ in range(2):
            layer(torch.zeros(BATCH, 1, layer.embed_dim, dtype=torch.bfloat16), cache=cache)


def ask(kind: str, head_dim: int, layer: ALiBiAttention) -> None:
    """Makes the calls of a kind; the first one that launches a kernel is the one that is compiled."""
    if kind == "table":
        step(toeplitz_attention, LENGTH, head_dim, torch.zeros(HEADS, LENGTH))
        return
    for queries in (LENGTH, FEW):
        bias = {"key_bias": torch.zeros(BATCH, HEADS, LENGTH)} if kind == "biased" else {}
        step(alibi_attention, queries, head_dim, torch.ones(HEADS), **bias)
    if kind == "plain":
        step(alibi_attention, LENGTH, head_dim, key_mask=torch.ones(BATCH, LENGTH, dtype=torch.bool))
        step(forgetting_attention, LENGTH, head_dim, logsigmoid(torch.zeros(BATCH, HEADS, LENGTH)))
        tokens(layer)


Asked = dict[str, tuple[Any, dict[str, Any]]]


@contextlib.contextmanager
def asked_to_compile(capability: tuple[int, int] = (9, 0)) -> Iterator[tuple[Asked, list[Launch]]]:
    """Inside, tensors say that they are on a device. Yields, by kernel, the first source that Triton is asked to compile and its
    options; and the launches.
    """
    asked: Asked = {}
    with absent_device(capability=capability) as launches:
        compile_nothing = compiler.compile

        def noted(source: Any, **more: Any) -> Any:
            asked.setdefault(source.fn.__name__, (source, more["options"]))
            return compile_nothing(source, **more)

        with mock.patch.object(compiler, "compile", noted):
            yield asked, launches


def sources(kind: str, head_dim: int, target: str) -> Asked:
    """What the calls of a kind ask Triton to compile, by kernel."""
    on_cuda = TARGETS[target].backend == "cuda"
    capability = divmod(TARGETS[target].arch, 10) if on_cuda else (8, 0)
    # Made here, because an absent device cannot convert it.
    layer = ALiBiAttention(HEADS * head_dim, HEADS, qk_norm=True, slopes=[4.0, 3.0, 2.0, 1.0]).to(torch.bfloat16).eval()
    with (
        mock.patch.object(torch.version, "hip", None if on_cuda else "absent"),
        asked_to_compile(capability) as (asked, _),
    ):
        ask(kind, head_dim, layer)
    # Calls for another target, or of another kind, ask again.
    for source, _ in asked.values():
        source.fn.device_caches.clear()
    for kept in (launch._COMPILED, recording._KNOWN):
        kept.clear()
    for kept in (devices._capability, launch.tiling):
        kept.cache_clear()
    return {name.removesuffix("_kernel"): found for name, found in asked.items()}


def figures(kernel: str, source: Any, options: dict[str, Any], target: str) -> dict[str, int]:
    """Figures of one kernel."""
    warps = options["num_warps"]
    given = {"num_warps": warps, "num_stages": options["num_stages"]}
    compiled = triton.compile(source, target=TARGETS[target], options=given)
    if TARGETS[target].backend != "cuda":
        code = compiled.asm["amdgcn"]
        spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
        return {
            "matrix_instructions": len(re.findall(r"\bv_mfma", code)),
            "spilled": int(spilled[1]),
            "shared_bytes": compiled.metadata.shared,
        }
    code = compiled.asm["ptx"]
    used = re.search(r"REG:(\d+) STACK:(\d+)", _dumped(compiled.asm["cubin"], "-res-usage"))
    assert used is not None
    sass = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _dumped(compiled.asm["cubin"], "-sass"))
    executed = [(int(at, 16), text) for at, text in sass]
    hearts = _hearts(executed)
    if kernel != "query":  # which has the loops of `over_tiles` twice
        hearts.sort(key=len)
    loop, *others = hearts or [[]]
    is_fixed = kernel == "forward" and source.signature["ONLINE"] != "constexpr"
    online = others[0] if is_fixed else []
    found = {
        "loop_instructions": len(loop),
        "online_instructions": len(online),
        "instructions": len(executed),
        "spills_in_loop": sum(name in ("LDL", "STL") for name in loop + online),
        "async_loads": len(re.findall(r"cp\.async\.(?:c|bulk\.tensor)", code)),
        "wgmma": code.count("wgmma.mma_async"),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|\bmma\.sync|tcgen05\.mma", code)),
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "shared_bytes": compiled.metadata.shared,
    }
    if "C" in source.fn.arg_names:
        at = source.fn.arg_names.index("C")
        tile = (source.constants[at, Tiling._fields.index(name)] for name in ("BM", "BN"))
        scores = math.prod(getattr(x, "value", x) for x in tile)
        found["instructions_per_score"] = round(len(loop) * 32 * warps / scores, 1)
    return found


def every_figure(asked: list[str]) -> dict[str, dict[str, int]]:
    """Figures by name, "sm_90/forward/D=64", of targets and their variants: "sm_90-wide" has D = 128, "sm_90-biased" a key bias,
    "sm_90-few" three kernels, "sm_90-table" a table.
    """
    found = {}
    for target, _, variant in (name.partition("-") for name in asked):
        for kind, head_dim, kernels in WANTED[variant]:
            every, word = sources(kind, head_dim, target), "" if kind == "plain" else f", {kind}"
            for kernel in kernels if target == "sm_90" else (*KERNELS, *WITH_TILES):
                name = kernel.removeprefix("table_").removeprefix("append_to_")
                found[f"{target}/{name}{word}/D={head_dim}"] = figures(kernel, *every[kernel], target)
    return found


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


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


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
