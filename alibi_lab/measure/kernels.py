"""The GPU kernels of a training step by name, from torch's profiler, and the rate of the attention kernels."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from alibi_attn.inspect import computed_scores
from alibi_lab.measure.harness import Row, prepared
from alibi_lab.measure.inputs import Case, Inputs
from alibi_lab.measure.peers import Peer, sdpa
from alibi_lab.measure.peers.ours import ours

REPEATS = 5
KERNELS = 16  # at most this many rows of a step
# Multiply-adds per score and number of a head: two, three and four products of matrices.
PRODUCTS = {"forward_kernel": 2, "query_kernel": 3, "key_kernel": 4}
LONGEST_PEER = 16384  # cuDNN's kernels take half a second at 131,072 tokens


def kernel_rows(case: Case, inputs: Inputs, backend: str) -> dict[str, Row]:
    """A row per kernel of a step, ours and cuDNN's; on a CPU the rows are torch's operations."""
    peers = {"ours": Peer("ours", ours(backend), "")}
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
                scores = computed_scores(
                    inputs.query, inputs.key, inputs.value, inputs.slopes, backend="fused", backward=backward
                )
                row |= {"scores": scores, "tflops": 2 * PRODUCTS[name] * case.head_dim * scores / ms / 1e9}
            rows[f"{way}: {name}"] = row
    return rows


@torch.enable_grad()
def of_step(step: Callable[[], object], device: torch.device) -> dict[str, tuple[float, float]]:
    """(milliseconds, launches) of each kernel in one step, the slowest first."""
    on_gpu = device.type == "cuda"
    step(), step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(REPEATS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found = {
        event.key[:80]: (
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / REPEATS / 1e3,
            event.count / REPEATS,
        )
        for event in profiled.key_averages()
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
    }
    slowest = sorted(found, key=lambda name: -found[name][0])
    return {name: found[name] for name in slowest[:KERNELS] if found[name][0] > 0}
