"""What the parts of `alibi bench gpu-models` share: cases, and the rows of training steps and of calls without gradients."""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_lab.measure.gpu_truth import Truth, allowed_error, judged, relative_error
from alibi_lab.measure.harness import Row, forward_pass
from alibi_lab.measure.peers import reason
from alibi_lab.measure.timing import device_ms, host_us, replayable, step_times

Calls = dict[str, Callable[[], Row]]  # by peer, what checks and times it

COLUMNS = (
    *("length", "batch", "relative_error", "allowed_error", "right", "forward_ms", "backward_ms", "host_us"),
    "why_not",
)
GRAPH = ", graph"  # ends the name of a call that a CUDA graph replays


class Case(NamedTuple):
    """The sizes of one measurement: sequences, tokens of each, heads and the size of a head."""

    batch: int
    length: int
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}, {self.heads}x{self.head_dim}"


def cases(full: str, smoke: str = "1x70x2x16") -> dict[str, tuple[Case, ...]]:
    """Cases by scale, written as "8x2048x16x128 …": sequences, tokens, heads and the size of a head."""
    by_scale = {"full": full, "smoke": smoke}
    return {scale: tuple(Case(*map(int, one.split("x"))) for one in text.split()) for scale, text in by_scale.items()}


class Part(NamedTuple):
    """One part of the benchmark, which makes one record.

    Args:
        seconds: its share of the time.
        peers: what each row is, by name; the rows of a case that cannot be prepared.
        cases: by scale.
        calls: (case, device) -> what checks and times each peer, in this order. It prepares what they share.
        columns: of a row.
        ours: the names of our own rows begin with one of these; only their wrong results are errors.
        imports: modules that are imported before the time begins: from a cold disk that takes seconds.
    """

    name: str
    seconds: float
    peers: Mapping[str, str]
    cases: Mapping[str, Sequence[Case]]
    calls: Callable[[Case, torch.device], Calls]
    columns: Sequence[str] = COLUMNS
    ours: tuple[str, ...] = ("ours",)
    imports: Sequence[str] = ()


def device_at(scale: str, benchmark: str) -> torch.device:
    """The GPU; at scale "smoke" the CPU, where Triton's interpreter runs the same code.

    Raises:
        ValueError: an unknown scale, or no CUDA device.
    """
    if scale not in ("full", "smoke"):
        raise ValueError(f"scale is {scale!r} but must be 'full' or 'smoke'")
    if scale == "full" and not torch.cuda.is_available():
        raise ValueError(
            f"alibi bench {benchmark} needs a CUDA device but there is none; pass --scale smoke to test it on a CPU"
        )
    return torch.device("cuda" if scale == "full" else "cpu")


def failures() -> tuple[type[Exception], ...]:
    """A failure of any of these is the reason in a row, and the benchmark goes on: time on a device is rare."""
    known = [ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError]
    known += [TypeError, ValueError]
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError  # of its compiler

        known.append(TritonError)
    return tuple(known)


def empty_row(part: Part, case: Case, failure: Exception | None = None) -> Row:
    """A row without numbers, with the reason if there is one."""
    why_not = None if failure is None else reason(failure)
    return {**dict.fromkeys(part.columns), "length": case.length, "batch": case.batch, "why_not": why_not}


def number_type(device: torch.device) -> torch.dtype:
    """bf16; in Triton's interpreter, which multiplies bf16 wrongly, fp32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def drawn(
    case: Case, device: torch.device, count: int = 4, *, tokens: int | None = None, seed: int = 0
) -> list[Tensor]:
    """`count` tensors [B, H, T, D] of standard normal numbers, the same ones for a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.length if tokens is None else tokens, case.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=number_type(device)) for _ in range(count)]


def in_both_ways(
    attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, truth: Truth, name: str
) -> Calls:
    """The training step of a peer, called and replayed."""
    return {
        name + way: functools.partial(step_row, attention, inputs, grad, truth, graph=way == GRAPH)
        for way in ("", GRAPH)
    }


@torch.enable_grad()
def step_row(
    attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, truth: Truth, *, graph: bool
) -> Row:
    """The errors and times of a training step; `forward_ms` is that of a call without gradients, `backward_ms` the rest."""
    leaves, device = [x.detach().requires_grad_() for x in inputs], grad.device

    def step() -> tuple[Tensor, ...]:
        output = attention(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    whole = replayable(step, device) if graph else step
    row = truth.row(whole())
    if row["right"]:
        forward = forward_pass(attention, leaves)
        alone = replayable(forward, device) if graph else forward
        whole(), alone()
        row |= step_times(timed(alone, device), timed(whole, device), host_us(whole, device))
    return row


def call_row(errors: Row, call: Callable[[], object], device: torch.device) -> Row:
    """These errors, and the times of the call, which is warm and has no gradient; a wrong one is not timed."""
    if not errors["right"]:
        return errors
    return errors | {"forward_ms": timed(call, device), "host_us": host_us(call, device)}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The median milliseconds of a few warm calls."""
    return device_ms(call, device, repeats=5, seconds=0.3)


def checked_row(
    call: Callable[[], Tensor],
    device: torch.device,
    true: Tensor,
    plain: float,
    compared: Callable[[Tensor], Tensor] = lambda output: output,
) -> Row:
    """The error of what is compared of the output, and times; twice the original's error is allowed."""
    output = compared(call())
    return call_row(judged(relative_error(output, true), allowed_error(plain, output.dtype)), call, device)
