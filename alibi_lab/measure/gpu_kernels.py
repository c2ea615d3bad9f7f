"""The time of each kernel of a causal training step, by name, from torch's profiler, and the rate of the attention kernels."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from alibi_attn.inspect import computed_scores
from alibi_lab.measure.gpu_parts import Calls, Case, Part, cases, drawn
from alibi_lab.measure.harness import Row, training_step
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers.ours import ours as ours_by
from alibi_lab.measure.peers.sdpa_causal import causal_by

REPEATS = 5
KERNELS = 16  # at most this many rows of a step
# Multiply-adds per score and number of a head: two, three and four products of matrices.
PRODUCTS = {"forward_kernel": 2, "query_kernel": 3, "key_kernel": 4}
LONGEST_PEER = 16384  # cuDNN's kernels take half a second at 131,072 tokens
COLUMNS = ("length", "batch", "ms", "calls", "scores", "tflops", "why_not")


def kernels(case: Case, device: torch.device) -> Calls:
    """A row per kernel, ours and cuDNN's."""
    query, key, value, grad = drawn(case, device)
    slopes, calls = published_slopes(case.heads, device), Calls()
    ways = {"ours": ours_by("fused"), "cuDNN": causal_by(SDPBackend.CUDNN_ATTENTION)}
    for way in ways if case.length <= LONGEST_PEER and device.type == "cuda" else ("ours",):
        step = training_step(ways[way](query, key, value, slopes), (query, key, value), grad)
        for name, kernel in of_step(step, device).items():
            row: Row = {**kernel}
            if way == "ours" and name in PRODUCTS:
                backward = name != "forward_kernel"
                scores = computed_scores(query, key, value, slopes, backend="fused", backward=backward)
                flops = 2 * PRODUCTS[name] * case.head_dim * scores
                row |= {"scores": scores, "tflops": flops / kernel["ms"] / 1e9}
            calls[f"{way}: {name}"] = functools.partial(dict, row)
    return calls


@torch.enable_grad()
def of_step(step: Callable[[], object], device: torch.device) -> dict[str, dict[str, float]]:
    """The milliseconds and launches in one step of each kernel, the slowest first; on a CPU those of torch's operations."""
    on_gpu = device.type == "cuda"
    place = DeviceType.CUDA if on_gpu else DeviceType.CPU
    step(), step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(REPEATS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found = {
        event.key[:80]: {
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / REPEATS / 1e3,
            "calls": event.count / REPEATS,
        }
        for event in profiled.key_averages()
        if event.device_type == place
    }
    slowest = sorted(found, key=lambda name: -found[name]["ms"])
    return {name: found[name] for name in slowest[:KERNELS] if found[name]["ms"] > 0}


NOTES = {"ours": "backend='fused'", "cuDNN": "SDPA is_causal=True, cuDNN's kernel; no ALiBi at all"}
CASES = cases("8x2048x16x128 1x16384x16x128 1x131072x16x128")
OF_KERNELS = Part("kernels", 15.0, NOTES, CASES, kernels, COLUMNS)
