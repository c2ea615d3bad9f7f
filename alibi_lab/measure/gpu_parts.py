"""What the parts of `alibi bench gpu-models` share: cases, the true results of one head, and the row of a training step."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_lab.measure.harness import Row
from alibi_lab.measure.peers import reason
from alibi_lab.measure.timing import device_ms, host_us, replayable

Calls = dict[str, Callable[[], Row]]  # by peer, what checks and times it
Formula = Callable[..., Tensor]  # attention of one head from [T, D], [S, D] and [S, D]

COLUMNS = (
    *("length", "batch", "relative_error", "allowed_error", "right", "forward_ms", "backward_ms", "host_us"),
    "why_not",
)
GRAPH = ", graph"  # ends the name of a call that a CUDA graph replays
# A failure of any of these is the reason in a row, and the benchmark goes on: time on a device is rare.
FAILURES: tuple[type[Exception], ...] = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    ValueError,
)


class Case(NamedTuple):
    """The sizes of one measurement: sequences, tokens of each, heads and the size of a head."""

    batch: int
    length: int
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}, {self.heads}x{self.head_dim}"


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
    """FAILURES, and those of Triton's compiler, which derive from nothing else."""
    if importlib.util.find_spec("triton") is None:
        return FAILURES
    from triton.errors import TritonError

    return (*FAILURES, TritonError)


def left_out(part: Part, case: Case, why_not: str | Exception) -> Row:
    """A row with the reason instead of numbers."""
    said = reason(why_not) if isinstance(why_not, Exception) else why_not
    return {**dict.fromkeys(part.columns), "length": case.length, "batch": case.batch, "why_not": said}


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


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention of one head, written by hand; scores are fp32 unless all is fp64."""
    scores = (query @ key.T) * query.shape[-1] ** -0.5
    scores = scores + bias.to(torch.promote_types(query.dtype, torch.float32))
    return scores.softmax(-1).to(value.dtype) @ value


def biased_by(bias: Tensor) -> Formula:
    """Attention of one head with this bias."""
    return lambda query, key, value: attended(query, key, value, bias)


def causal_distance(length: int, device: torch.device) -> Tensor:
    """[T, T] fp64, i − j; infinite where the key is in the future."""
    places = torch.arange(length, device=device, dtype=torch.float64)
    distance = places[:, None] - places
    return distance.masked_fill_(distance < 0, torch.inf)


@dataclasses.dataclass(frozen=True)
class Truth:
    """Output and gradients of the middle head of the last sequence: in fp64, and by hand in the dtype of the inputs."""

    true: list[Tensor]
    plain: list[Tensor]
    eps: float

    @classmethod
    def of(cls, formula: Formula, inputs: Sequence[Tensor], grad: Tensor | None = None) -> "Truth":
        """Of the formula for [B, H, …] inputs; without `grad` of its output alone."""
        of_head = [head(x).detach() for x in inputs]
        exact = [x.double() for x in of_head]
        true, plain = (_results(formula, x, None if grad is None else head(grad)) for x in (exact, of_head))
        return cls(true, plain, torch.finfo(inputs[0].dtype).eps)

    def row(self, outputs: Sequence[Tensor]) -> Row:
        """The largest error as a share of the largest number of its tensor; twice that of the plain formula is allowed."""
        errors = []
        for actual, plain, true in zip(outputs, self.plain, self.true, strict=True):
            largest = max(float(true.abs().max()), 1e-30)
            error, by_hand = (float((x.double() - true).abs().max()) / largest for x in (head(actual), plain))
            errors.append((error, 2 * by_hand + 4 * self.eps))
        return judged(*max(errors, key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else torch.inf))


def judged(error: float, allowed: float) -> Row:
    """The columns of an error; NaN is wrong."""
    right = error <= allowed
    why_not = None if right else f"it is wrong: off by {error:.1e} but {allowed:.1e} is allowed"
    return {"relative_error": error, "allowed_error": allowed, "right": right, "why_not": why_not}


def head(x: Tensor) -> Tensor:
    """The middle head of the last sequence."""
    return x[-1, x.shape[1] // 2]


def _results(formula: Formula, inputs: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    leaves = [x.requires_grad_(grad is not None) for x in inputs]
    output = formula(*leaves)
    gradients = () if grad is None else torch.autograd.grad(output, leaves, grad.to(output.dtype))
    return [output.detach(), *gradients]


def in_both_ways(
    attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, truth: Truth, name: str
) -> Calls:
    """The training step of a peer, called and replayed."""
    return {
        name + way: functools.partial(step_row, attention, inputs, grad, truth, graph=way == GRAPH)
        for way in ("", GRAPH)
    }


def step_row(
    attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, truth: Truth, *, graph: bool
) -> Row:
    """The errors and times of a training step; `forward_ms` is that of a call without gradients, `backward_ms` the rest."""
    leaves, device = [x.detach().requires_grad_() for x in inputs], grad.device

    def step() -> tuple[Tensor, ...]:
        output = attention(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves)

    whole = replayable(step, device) if graph else step
    row = truth.row(whole())
    if row["right"]:
        alone = replayable(forward, device) if graph else forward
        whole(), alone()
        forward_ms, whole_ms = timed(alone, device), timed(whole, device)
        row |= {
            "forward_ms": forward_ms,
            "backward_ms": max(whole_ms - forward_ms, 0.0),
            "host_us": host_us(whole, device),
        }
    return row


def call_row(call: Callable[[], object], device: torch.device) -> Row:
    """The times of a call that is warm and has no gradient."""
    return {"forward_ms": timed(call, device), "host_us": host_us(call, device)}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The median milliseconds of a few warm calls."""
    return device_ms(call, device, repeats=5, seconds=0.3)
