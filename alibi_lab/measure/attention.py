"""`alibi bench attention`: attention, forward and backward: ours and what users would run instead, on a CPU or a GPU, in PyTorch
or JAX.
"""

import functools
import math
import multiprocessing
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from alibi_attn import inspect
from alibi_attn.inspect import TILE
from alibi_lab.measure.harness import Budget, Columns, Row, Rows, Say, Timed, check_names, keep, prepared, table
from alibi_lab.measure.inputs import DTYPES, Case, Inputs, cases_of, described
from alibi_lab.measure.peers import Attention, Peer, eager, flash_attn, flex, rank_two, sdpa, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours

LENGTHS = {"cpu": tuple(2**n for n in range(9, 17)), "cuda": (2048, 16384, 131072, 512, 1024, 4096, 8192, 32768, 65536)}
SHAPES = {"cpu": (8, 64), "cuda": (16, 128)}
PRUNED_AT = math.exp(-10)  # the ε of ACP's authors' code
PROFILED_STEPS = 5
KERNELS = 16  # at most this many rows of a step
# Multiply-adds per score and number of a head: two, three and four products of matrices.
PRODUCTS = {"forward_kernel": 2, "query_kernel": 3, "key_kernel": 4}
LONGEST_PEER = 16384  # cuDNN's kernels take half a second at 131,072 tokens

DENSE, EAGER, RANK_TWO, FLEX = sdpa_dense_bias.PEER, eager.PEER, rank_two.PEER, flex.PEER
# What users would run instead, by framework and device, with the longest inputs that fit.
PEERS: Mapping[str, Sequence[Peer]] = {
    "torch cpu": (
        replace(sdpa.PEER, longest=32768),
        replace(DENSE, longest=8192),
        replace(RANK_TWO, longest=16384, longest_backward=8192),
        replace(EAGER, longest=2048),
        replace(FLEX, longest=4096, longest_backward=0),  # no backward on a CPU
    ),
    "torch cuda": (sdpa.PEER, sdpa.FLASH, sdpa.CUDNN, DENSE, RANK_TWO, EAGER, FLEX, *flash_attn.installed()),
    "interpreter": (sdpa.PEER, sdpa.CUDNN, DENSE, RANK_TWO, EAGER),
}


def attention(
    out: Path,
    *,
    inputs: Sequence[str] = ("noise",),
    lengths: Sequence[int] = (),
    batch: int = 0,
    shape: Sequence[tuple[int, int]] = (),
    device: str = "cpu",
    dtype: str = "",
    framework: str = "torch",
    backend: str = "auto",
    dropout: float = 0.0,
    backward: bool = True,
    memory: bool = False,
    graphs: bool = False,
    kernels: bool = False,
    checkpoint: Path | None = None,
    repeats: int = 5,
    seconds: float = 20.0,
    limit: float = 3600.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per kind of input and shape, and returns their paths.

    Args:
        inputs: kinds of input: noise, peaked (queries three times as long), sink (a first key ten times as long),
            root-distance (√-ALiBi), plane (patches of an image), masked (symmetric, with padding), gates-LOGIT-U-BOUND (forget
            gates), trained; default noise.
        lengths: sequence lengths in the order in which they are measured; default 512 … 65536, on a GPU to 131072.
        batch: sequences per batch; default 1, on a GPU as many as have 16,384 tokens.
        shape: numbers and sizes of heads; default 8x64, on a GPU 16x128.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16"; default float32, on a GPU bfloat16. On a CPU a half also runs ours in fp32.
        framework: "torch" or "jax", which includes our PyTorch call.
        backend: of our call.
        dropout: also measure ours with this dropout probability, below 1; 0 = not measured.
        backward: also measure forward and backward.
        memory: also measure our peak memory on a CPU, each in its own process.
        graphs: on a GPU, also replay every call as a CUDA graph.
        kernels: on a GPU, also list the time of each kernel of a step.
        checkpoint: for inputs of kind trained: a model of alibi run.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length and direction.
        limit: time limit in seconds for all.

    Raises:
        RuntimeError: our result was wrong; the records are kept. A wrong peer is a row without times.
    """
    dtype = checked_dtype(device, dtype, framework, dropout)
    name = f"{'jax-' if framework == 'jax' else ''}{device}-{dtype}"
    budget = Budget(
        repeats=repeats, seconds=seconds, end=time.perf_counter() + limit, backward=backward, memory=memory, graphs=graphs,
        patience_s=3.0 if device == "cuda" else math.inf,
    )  # fmt: skip
    cases = {
        f"attention/{name}-{kind}-{heads}x{size}{f'-batch-{batch}' if batch > 1 else ''}": cases_of(
            lengths or LENGTHS[device], kind=kind, heads=heads, head_dim=size, batch=batch, dtype=dtype, device=device,
            path=checkpoint,
        )
        for kind in inputs
        for heads, size in shape or [SHAPES[device]]
    }  # fmt: skip
    peers = functools.partial(peers_of, framework=framework, backend=backend, dropout=dropout)
    configs = {
        record: {
            **described(each), "kind": each[0].kind, "batch": batch, "framework": framework, "backend": backend,
            "dropout": dropout, "backward": backward, "checkpoint": None if checkpoint is None else checkpoint.name,
        }
        for record, each in cases.items()
    }  # fmt: skip

    def more(case: Case, given: Inputs, rows: dict[str, Timed]) -> Rows:
        counted = framework == "torch" and (given.causal or given.points is not None)
        found = {"scores": scores(given, backend)} if counted else {}
        return {**found, **(kernel_rows(case, given, backend) if kernels else {})}

    if device == "cuda":
        _compile_ahead([case for each in cases.values() for case in each if case.length <= 131072], budget)
    return keep(out, configs, table(cases, peers, budget, more), say=say, summary=summary)


def peers_of(case: Case, inputs: Inputs, *, framework: str, backend: str, dropout: float) -> list[Peer]:
    """Ours, and what users would run instead, for one input."""
    device = case.device.type
    if framework == "jax":
        return _jax_peers(backend)
    ourselves = Peer("ours", ours(backend), gated=inputs.log_fgate is not None)
    if inputs.log_fgate is not None:
        causal = [sdpa.PEER, *([sdpa.CUDNN] if device == "cuda" else [])]
        plain = Peer("ours, fixed slopes", _fixed(backend), biased=False)
        return [ourselves, *causal, replace(DENSE, longest=4096 if device == "cpu" else 16384), plain]
    if inputs.table is not None:
        all_keys = Peer("ours, all keys", ours(backend, tolerance=0.0))
        return [ourselves, all_keys, replace(DENSE, longest=4096 if device == "cpu" else 8192)]
    if inputs.points is not None:
        return [ourselves, sdpa.PLAIN, replace(DENSE, longest=8192)]
    if not inputs.causal:
        return [ourselves, sdpa.MASKED, replace(DENSE, longest=8192)]
    half = case.dtype != torch.float32 and device == "cpu"
    without = Peer("ours, no compiler", ours("banded"), longest=32768)  # for machines without g++
    mine = [ourselves]
    if dropout > 0:
        mine.append(Peer("ours, dropout", ours(backend, dropout_p=dropout), dropout_p=dropout))
    if device == "cpu" and backend == "auto":
        in_fp32 = replace(ourselves, name="ours, fp32", dtype=torch.float32)
        mine.append(in_fp32 if half else without)
    others = PEERS[f"torch {device}" if device == "cuda" or backend != "fused" else "interpreter"]
    return [*mine, *(peer for peer in others if not (half and peer.name in (FLEX.name, RANK_TWO.name)))]


def _fixed(backend: str) -> Callable[[Inputs], Attention]:
    """Ours with slopes of 0 for gates: what a score costs without gates. Its truth is attention without a bias."""
    return lambda inputs: ours(backend)(replace(inputs, log_fgate=None, slopes=0 * inputs.slopes))


def _jax_peers(backend: str) -> list[Peer]:
    import alibi_attn.jax  # noqa: F401, which names the extra if JAX is missing
    from alibi_lab.measure.peers import dot_product_attention as theirs

    named = {} if backend == "auto" else {"backend": backend}
    listed = [
        Peer("ours", theirs.ours(**named)),
        Peer("ours, the loop", theirs.ours(backend="loop"), longest=8192),
        Peer("ours, dense", theirs.ours(backend="dense"), longest=4096),
        Peer("dense bias", theirs.dense, longest=8192),
        Peer("causal, no bias", theirs.causal(), longest=8192, biased=False),
        Peer("no bias, cuDNN", theirs.causal(implementation="cudnn"), biased=False),
    ]
    return [*(replace(peer, framework="jax") for peer in listed), Peer("PyTorch", ours("auto"))]


def checked_dtype(device: str, dtype: str, framework: str = "torch", dropout: float = 0.0) -> str:
    """The dtype, by default that of the device; raises ValueError if an option is invalid."""
    dtype = dtype or {"cpu": "float32", "cuda": "bfloat16"}.get(device, "")
    check_names(device=([device], SHAPES), dtype=([dtype], DTYPES), framework=([framework], ("torch", "jax")))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device; pass --device cpu, with TRITON_INTERPRET=1 and --backend fused for the Triton kernels"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout} but must be a probability in [0, 1); pass 0 to leave dropout out")
    return dtype


def scores(inputs: Inputs, backend: str) -> dict[str, float | int]:
    """The scores of a call: all that are visible, and those that our kernels compute, on a line also in backward.

    With gates also those inside the boundary of Adaptive Computation Pruning (ACP; Lin et al. 2025, arXiv:2504.06949), in the
    same blocks, at our tolerance and at that of its authors; `ours_at_acps` is ours at the latter.
    """
    query, key, value, slopes = inputs.query, inputs.key, inputs.value, inputs.slopes
    batch, heads, length, _ = key.shape
    bias = None if inputs.log_fgate is None else -inputs.log_fgate.double().cumsum(-1)
    name = inspect.backend_of(query, key, value) if backend == "auto" and inputs.table is None else backend
    count = functools.partial(
        inspect.computed_scores, query, key, value, slopes, backend=name, key_bias=bias, table=inputs.table,
        causal=inputs.causal, positions=inputs.points,
    )  # fmt: skip
    visible = batch * heads * length * (length + 1) // 2 if inputs.causal else batch * heads * length**2
    found: dict[str, float | int] = {"length": length, "visible": visible}
    with torch.no_grad():
        found |= {"ours": count()}
        found |= {} if inputs.points is not None else {"ours_in_backward": count(backward=True)}
        if inputs.log_fgate is not None:
            decay = inputs.log_fgate - slopes[:, None]
            tolerance = inspect.default_tolerance(query, key, value)
            pruned = functools.partial(pruned_scores, decay, query, key)
            found |= {"acp": pruned(tolerance), "tolerance": tolerance}
            found |= {"ours_at_acps": count(tolerance=PRUNED_AT), "acp_at_acps": pruned(PRUNED_AT)}
    return found


def pruned_scores(decay: Tensor, query: Tensor, key: Tensor, tolerance: float) -> int:
    """The scores inside ACP's boundary, in blocks of TILE: a tile is left out once the decay to it is below δ, where
    δ = −(2U + ln n) + ln ε with one bound U of q·k per head.
    """
    length = query.shape[2]
    c = decay.double().cumsum(-1)
    bound = query.double().norm(dim=-1).amax(-1) * key.double().norm(dim=-1).amax(-1) * query.shape[-1] ** -0.5
    delta = -(2 * bound + math.log(length)) + math.log(tolerance)
    starts = torch.arange(0, length, TILE)
    ends = (starts + TILE).clamp(max=length)
    # c decreases, so the skipped tiles are the first ones.
    skipped = (c[..., None, ends - 1] > (c[..., starts] - delta[..., None])[..., None]).sum(-1) * TILE
    return int(((ends - torch.minimum(skipped, starts)) * (ends - starts)).sum())


def kernel_rows(case: Case, inputs: Inputs, backend: str) -> dict[str, Row]:
    """A row per kernel of a step, ours and cuDNN's; on a CPU the rows are torch's operations."""
    peers = {"ours": Peer("ours", ours(backend))}
    if case.length <= LONGEST_PEER and case.device.type == "cuda":
        peers["cuDNN"] = sdpa.CUDNN
    rows: dict[str, Row] = {}
    for way, peer in peers.items():
        step = prepared(peer, inputs, backward=True).step
        assert step is not None
        for name, (ms, calls) in of_step(step, case.device).items():
            row: dict[str, float | int] = {"length": case.length, "batch": case.batch, "ms": ms, "calls": calls}
            if way == "ours" and name in PRODUCTS:
                backward = name != "forward_kernel"
                count = inspect.computed_scores(
                    inputs.query, inputs.key, inputs.value, inputs.slopes, backend="fused", backward=backward
                )
                row |= {"scores": count, "tflops": 2 * PRODUCTS[name] * case.head_dim * count / ms / 1e9}
            rows[f"{way}: {name}"] = row
    return rows


@torch.enable_grad()
def of_step(step: Callable[[], object], device: torch.device) -> dict[str, tuple[float, float]]:
    """(milliseconds, launches) of each kernel in one step, the slowest first."""
    on_gpu = device.type == "cuda"
    step(), step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    own_us = operator.attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    found = {event.key[:80]: event for event in profiled.key_averages() if event.device_type == where}
    slowest = sorted(found, key=lambda name: -own_us(found[name]))[:KERNELS]
    ms = {name: own_us(found[name]) / PROFILED_STEPS / 1e3 for name in slowest}
    return {name: (ms[name], found[name].count / PROFILED_STEPS) for name in slowest if ms[name] > 0}


def _compile_ahead(cases: Sequence[Case], budget: Budget) -> None:
    """Compiles FlexAttention for these cases on idle cores, for at most a quarter of the time."""
    # A case that cannot be compiled fails again in its measurement, whose row has the reason.
    some = [case for case in cases if case.kind in ("noise", "peaked")]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        # The end of this block ends what the processes still do: a compilation can take longer than all measurements may.
        pool.map_async(flex.compile_ahead, some, chunksize=1).wait(max(budget.end - time.perf_counter(), 0.0) / 4)


def summary(name: str, columns: Columns) -> dict[str, float | None]:
    """How each peer's time grows: the slope of log time over log length, for the longer half of the lengths."""
    growth: dict[str, float | None] = {}
    for peer, column in columns.items():
        rows = zip(*(column.get(x, []) for x in ("length", "forward_ms", "backward_ms")), strict=False)
        points = sorted((n, f + b) for n, f, b in rows if f is not None and b is not None and f + b > 0)
        points = points[len(points) // 2 :] if len(points) > 3 else points
        if len({n for n, _ in points}) >= 2:
            lengths, times = np.log(np.array(points, dtype=float)).T
            growth[f"growth of {peer}"] = float(np.polyfit(lengths, times, 1)[0])
    return growth
