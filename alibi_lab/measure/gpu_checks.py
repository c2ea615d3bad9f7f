"""The checks of `alibi bench gpu` before anything is timed: our kernels compared with fp64, in several processes."""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn import alibi_attention
from alibi_lab.measure.gpu_truth import worst_error
from alibi_lab.measure.harness import Row
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import flex

TENSORS = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of slopes")
CHECKED_LENGTH = 777
CHECKED: tuple[dict[str, object], ...] = (
    {},
    {"causal": False},
    {"window": 100},
    {"scale": 0.2},
    {"query_offset": 40},
    {"query_offset": -300},
    {"kv_heads": 2},
    {"queries": 3, "kv_heads": 2},
    {"causal": False, "window": 50},
    {"masked": True},
    {"segments": True},
)


def all_checked(
    calls: Sequence[tuple[torch.dtype, dict[str, object]]],
    device: torch.device,
    ahead: Sequence[tuple[int, int, int, int, torch.dtype]] = (),
    *,
    patience_s: float = 0.0,
) -> list[Row]:
    """One row per checked call. On a GPU several processes share it, because compiling dominates the time.

    Args:
        ahead: arguments of `compile_ahead`: what FlexAttention is compiled for while other cores are idle.
        patience_s: after this time the shapes that are not yet compiled are left to their measurement.
    """
    if device.type != "cuda":
        return [_check(*call, device) for call in calls]
    end = time.perf_counter() + patience_s
    workers, context = min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    try:
        checks = [executor.submit(_check, *call, device) for call in calls]
        # A shape that cannot be compiled fails again in its measurement, whose row gives the reason.
        compiled = [executor.submit(flex.compile_ahead, *shape) for shape in ahead]
        rows = [check.result() for check in checks]
        concurrent.futures.wait(compiled, timeout=max(end - time.perf_counter(), 0.0))
        return rows
    finally:
        end_at_once(executor)


def end_at_once(executor: concurrent.futures.ProcessPoolExecutor) -> None:
    """Ends an executor with all that its processes do: a compilation can take longer than all measurements may."""
    processes = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
        process.join()


def _check(dtype: torch.dtype, case: dict[str, object], device: torch.device) -> Row:
    """Compares outputs and gradients of one call with fp64; twice the error of `dense` is allowed.

    The errors are shares of the largest number of their tensor, and the row has those of the worst tensor.
    """
    drawn, grad, options = arguments_of(dtype, case, device, CHECKED_LENGTH if device.type == "cuda" else 40)
    results: list[list[Tensor]] = []
    for backend, work in (("fused", dtype), ("dense", dtype), ("reference", torch.float64)):
        leaf = [*(x.to(work).detach().requires_grad_() for x in drawn), published_slopes(4, device).requires_grad_()]
        output = alibi_attention(*leaf, **options, backend=backend)  # type: ignore[call-overload]
        gradients = torch.autograd.grad(output, leaf, grad.to(work))
        results.append([x.detach().double() for x in (output, *gradients)])
    ours, plain, true = results
    worst, error, allowed = worst_error(ours, plain, true, torch.finfo(dtype).eps)
    if not error <= allowed:
        raise RuntimeError(
            f"fused is wrong in {dtype} with {case}: {TENSORS[worst]} is off by {error:.2e} of its largest number "
            f"but {allowed:.2e} is allowed"
        )
    return {"case": str(case), "dtype": str(dtype), "tensor": TENSORS[worst], "error": error, "allowed": allowed}


def arguments_of(
    dtype: torch.dtype, case: dict[str, object], device: torch.device, length: int
) -> tuple[list[Tensor], Tensor, dict[str, object]]:
    """([query, key, value], the gradient of the output, options) of a checked call."""
    generator = torch.Generator().manual_seed(0)
    options = dict(case)
    queries, kv_heads = int(str(options.pop("queries", length))), int(str(options.pop("kv_heads", 4)))
    if options.pop("masked", False):
        options["key_mask"] = (torch.rand(2, length, generator=generator) < 0.7).to(device)
    if options.pop("segments", False):
        options["segment_ids"] = (torch.arange(length) // 100).expand(2, length).to(device)
    shapes = [(2, 4, queries, 64), (2, kv_heads, length, 64), (2, kv_heads, length, 64)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(device, dtype)
    return drawn, grad, options
