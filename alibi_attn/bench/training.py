"""What share of a processor's matrix rate a step of training reaches, model FLOPs utilization, and where its time goes.

    utilization = FLOPs of the model in a step / seconds of the step / rate of a large matrix product     (MFU)

(Chowdhery et al. 2022, PaLM, appendix B, arXiv:2204.02311). The rate is that of `torch.mm`, measured in the same run with the
same threads and dtype, and not one from a data sheet: what the products of a step would reach if they were large and alone.
What is trained, and who takes the steps, says `recipes/utilization.py`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from alibi_attn.bench.timing import matrix_rate_gflops
from alibi_attn.records import Json

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Forward and backward of torch's attention; ours as an autograd.Function (`attention/eager.py`), and as operators.
ATTENTION = ("aten::scaled_dot_product", "aten::_scaled_dot_product", "_Attention", "alibi_attn::")
# A logit is rounded to bf16 by at most 2⁻⁸ of itself, and a loss is the difference of two such numbers; what the layers before
# have rounded goes up and down, and is gone from the mean over thousands of tokens.
LOSS_TOLERANCE = 2.0**-7
# A norm is made of millions of gradients that are off by a few 2⁻⁸ each, one up, one down; what is forgotten or counted twice
# changes it by far more.
NORM_TOLERANCE = 2.0**-4


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """The FLOPs that a step of training asks for, forward (a third) and backward; a multiplication and an addition are two.

        linear      6 · parameters · rows · length
        attention   12 · layers · heads · head_dim · pairs,    pairs = rows · length · (length + 1) / 2

    Every pair of a query and a key that it may see is counted once, so that causality halves attention: PaLM's formula, with
    12 · layers · heads · head_dim · length a token, counts the hidden pairs as well. What an implementation computes again in
    backward does not count, nor does what it skips with a certificate: these are the model's FLOPs, whoever computes them.
    Norms, activations, softmax, the loss, the optimizer and what a position method computes count as nothing.

    Args:
        parameters: that multiply every token: the matrices of all linear layers, and of the projection to the vocabulary; not
            the norms, and not the input embeddings, which are looked up (where both are one matrix, it counts once).
    """

    parameters: int
    layers: int
    heads: int
    head_dim: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def linear(self) -> int:
        return 6 * self.parameters * self.tokens

    @property
    def attention(self) -> int:
        pairs = self.rows * self.length * (self.length + 1) // 2
        return 12 * self.layers * self.heads * self.head_dim * pairs


def utilization_row(flops: ModelFlops, step_ms: float, product_ms: float) -> dict[str, Json]:
    """The columns of one configuration, whose step and whose matrix product took so long."""
    achieved, rate = (flops.linear + flops.attention) / step_ms / 1e6, matrix_rate_gflops(product_ms)
    return {
        "length": flops.length,
        "step_ms": step_ms,
        "tokens_per_second": flops.tokens / step_ms * 1e3,
        "linear_flops": flops.linear,
        "attention_flops": flops.attention,
        "achieved_gflops": achieved,
        "matrix_gflops": rate,
        "utilization": achieved / rate,
    }


def expect_agreement(name: str, wide: Sequence[tuple[float, float]], half: Sequence[tuple[float, float]]) -> None:
    """Hold the first steps of a training in bf16 against those in fp32; each is its loss and its gradient's norm.

    Raises:
        RuntimeError: they differ by more than the rounding of bf16.
    """
    for step, (expected, found) in enumerate(zip(wide, half, strict=True), start=1):
        for what, true, ours, most in zip(
            ("loss", "gradient's norm"), expected, found, (LOSS_TOLERANCE, NORM_TOLERANCE), strict=True
        ):
            if not abs(ours - true) <= most * abs(true):
                raise RuntimeError(
                    f"{name} is wrong: at step {step} the {what} is {true:.6g} in fp32 and {ours:.6g} in bf16, but they may "
                    f"differ by {most:.2g} of it at most"
                )


class Event(Protocol):
    """What is read of an event of torch's profiler."""

    @property
    def name(self) -> str: ...
    @property
    def self_cpu_time_total(self) -> float: ...
    @property
    def cpu_parent(self) -> "Event | None": ...


def profiled_shares(step: Callable[[], object]) -> dict[str, Json]:
    """The shares of a step's time, of one that the profiler watches, which makes everything but products a little longer."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # The time of "step" itself is Python's, between the operators.
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("step"):
        step()
    return time_shares(profile.events())


def time_shares(events: Iterable[Event]) -> dict[str, Json]:
    """The shares of the time of all events that matrix products, attention and everything else take.

    Attention is the operators of ATTENTION and all that they call. Matrix products are those of MATRIX_PRODUCTS outside of them:
    attention that is written out (short calls, dense biases) counts as matrix products and everything else.
    """
    spent = {"matrix_time_share": 0.0, "attention_time_share": 0.0, "other_time_share": 0.0}
    for event in events:
        spent[_kind(event)] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {name: time / whole for name, time in spent.items()}


def _kind(event: Event) -> str:
    above: Event | None = event
    while above is not None:
        if above.name.startswith(ATTENTION):
            return "attention_time_share"
        above = above.cpu_parent
    return "matrix_time_share" if event.name in MATRIX_PRODUCTS else "other_time_share"
