"""Model FLOPs utilization: the share of a CPU's matrix rate that a training step reaches, and where its time is spent.

    utilization = FLOPs of the model in a step / seconds of the step / rate of a large matrix product     (MFU)

(Chowdhery et al. 2022, PaLM, appendix B, arXiv:2204.02311). The rate is not from a data sheet: it is that of
`torch.mm`, measured in the same run with the same threads and dtype. A step's products would reach it if they were
large and ran alone. The benchmark is in `training.py`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent

from alibi_attn.nn.linear.fastest import is_slow
from alibi_lab.lab.config import Precision, RunConfig
from alibi_lab.lab.training.flops import DTYPES, attention_flops, linear_flops
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import matrix_product, matrix_rate_gflops

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Forward and backward of torch's attention; ours as an autograd.Function (`attention/operators/operator.py`), and as operators.
ATTENTION = ("aten::scaled_dot_product", "aten::_scaled_dot_product", "_Attention", "alibi_attn::")
# Rounding a logit to bf16 costs at most 2⁻⁸ of it, and a loss is the difference of two such numbers; the rounding of earlier
# layers cancels in the mean over thousands of tokens.
LOSS_TOLERANCE = 2.0**-7
# A norm sums millions of gradients, each off by a few 2⁻⁸ in either direction; a missing or doubled gradient changes it by far
# more.
NORM_TOLERANCE = 2.0**-4


@functools.cache
def product_in(precision: Precision) -> Callable[[], object]:
    """A matrix product in the dtype in which a training multiplies: fp32 if this CPU has no instructions for the other dtype."""
    dtype = DTYPES[precision]
    return matrix_product(torch.float32 if is_slow(dtype) else dtype)


def utilization_row(config: RunConfig, step_ms: float, product_ms: float) -> Row:
    """The columns of one config, from the times of its step and of a matrix product."""
    linear, attention = linear_flops(config), attention_flops(config)
    achieved, rate = (linear + attention) / step_ms / 1e6, matrix_rate_gflops(product_ms)
    return {
        "length": config.train.length,
        "step_ms": step_ms,
        "tokens_per_second": config.train.batch_tokens / step_ms * 1e3,
        "linear_flops": linear,
        "attention_flops": attention,
        "achieved_gflops": achieved,
        "matrix_gflops": rate,
        "utilization": achieved / rate,
    }


def expect_agreement(name: str, wide: Sequence[tuple[float, float]], half: Sequence[tuple[float, float]]) -> None:
    """Compares the first steps of a training in bf16 with those in fp32; a step is (loss, gradient norm).

    Raises:
        RuntimeError: they differ by more than the rounding of bf16.
    """
    allowed = (("loss", LOSS_TOLERANCE), ("gradient's norm", NORM_TOLERANCE))
    for step, (expected, half_step) in enumerate(zip(wide, half, strict=True), start=1):
        for (what, most), true, ours in zip(allowed, expected, half_step, strict=True):
            if not abs(ours - true) <= most * abs(true):
                raise RuntimeError(
                    f"{name} is wrong: at step {step} the {what} is {true:.6g} in fp32 and {ours:.6g} in bf16 but may "
                    f"differ by at most {most:.2g} of it"
                )


def profiled_shares(step: Callable[[], object]) -> Row:
    """The shares of a profiled step's time. Profiling slightly slows down everything except matrix products."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # The self time of "step" is Python's, between the operators.
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("step"):
        step()
    return time_shares(profile.events())


def time_shares(events: Iterable[FunctionEvent]) -> Row:
    """The shares of time of matrix products, of attention and of everything else.

    Attention is the operators of ATTENTION and everything they call. Matrix products are MATRIX_PRODUCTS outside of it.
    Attention that is computed by ordinary operators (short calls, dense biases) counts as matrix products and everything else.
    """
    spent = {"matrix_time_share": 0.0, "attention_time_share": 0.0, "other_time_share": 0.0}
    for event in events:
        spent[_kind(event)] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {name: time / whole for name, time in spent.items()}


def _kind(event: FunctionEvent) -> str:
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith(ATTENTION):
            return "attention_time_share"
        above = above.cpu_parent
    return "matrix_time_share" if event.name in MATRIX_PRODUCTS else "other_time_share"
