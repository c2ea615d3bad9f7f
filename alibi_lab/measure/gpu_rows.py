"""Rows of `alibi bench gpu`: the errors and times of one peer at one length, for each kind of input."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.inspect import TILE, computed_scores, device_plan, tiles_of_a_step
from alibi_lab.measure.correctness import Reference, computed
from alibi_lab.measure.gpu_parts import Case, drawn
from alibi_lab.measure.harness import Row, forward_pass, number, training_step, whole_ms
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import Attention, Peer, reason
from alibi_lab.measure.timing import device_ms, host_us, step_times

KINDS = ("noise", "peaked")
TOKENS = 16384  # batch · length, for lengths below it
# The columns of (training steps, decoding): those of every peer, then the additional ones of "ours".
_COLUMNS = (
    "length relative_error gradient_error right forward_ms backward_ms host_us nominal_tflops why_not",
    "length relative_error right forward_ms host_us why_not",
)
_OUR_COLUMNS = ("plan_share measured_share computed_tflops", "bytes_read bytes_least bytes_all")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs that all peers get.

    Args:
        queries: by kind, [B, H, T, D]; T = 1 is decoding.
        key, value: [B, H, S, D].
        grad: gradient of the output.
        slopes: [H] fp32.
        references: the true results, by kind.
    """

    queries: dict[str, Tensor]
    key: Tensor
    value: Tensor
    grad: Tensor
    slopes: Tensor
    references: dict[str, Reference]

    @classmethod
    def draw(
        cls, kinds: Sequence[str], length: int, shape: tuple[int, int], device: torch.device, *, decoding: bool
    ) -> "Inputs":
        """Normal numbers for TOKENS tokens, at least one sequence (on a CPU one); "peaked" has queries three times as long."""
        batch = 1 if device.type == "cpu" else max(1, TOKENS // length)
        query, key, value, grad = drawn(Case(batch, length, *shape), device)
        if decoding:
            query, grad = query[:, :, -1:], grad[:, :, -1:]
        queries = {kind: query * 3 if kind == "peaked" else query for kind in kinds}
        slopes = published_slopes(shape[0], device)
        references = {kind: Reference.of(q, key, value, grad, slopes) for kind, q in queries.items()}
        return cls(queries, key, value, grad, slopes, references)

    @property
    def decoding(self) -> bool:
        return self.grad.shape[2] == 1


def unmeasured(peer: Peer, length: int, *, decoding: bool, why_not: str) -> Row:
    """A row with the reason instead of numbers."""
    columns = f"{_COLUMNS[decoding]} {_OUR_COLUMNS[decoding] if peer.name == 'ours' else ''}"
    return {**dict.fromkeys(columns.split()), "length": length, "why_not": why_not}


def measured(peer: Peer, inputs: Inputs) -> dict[str, Row]:
    """A row per kind; the peer is prepared once for all of them.

    The row of a peer that cannot run has the reason. A wrong peer is not timed and has `right: False`; so does one of our calls
    that cannot run.
    """
    attention, rows = None, {}
    for kind in inputs.queries:
        try:
            if attention is None:
                attention = peer.prepare(inputs.queries[kind], inputs.key, inputs.value, inputs.slopes)
            rows[kind] = _row(peer, attention, kind, inputs)
        except (RuntimeError, ImportError) as refusal:
            row = unmeasured(peer, inputs.key.shape[2], decoding=inputs.decoding, why_not=reason(refusal))
            rows[kind] = {**row, "right": False if peer.is_ours else None}
            torch.cuda.empty_cache()
    return rows


def _row(peer: Peer, attention: Attention, kind: str, inputs: Inputs) -> Row:
    query, key, value, slopes = inputs.queries[kind], inputs.key, inputs.value, inputs.slopes
    b, h, n, d = key.shape
    grad = None if inputs.decoding or n > peer.longest_backward else inputs.grad
    errors = inputs.references[kind].compare(peer, computed(attention, query, key, value, grad))
    row = unmeasured(peer, n, decoding=inputs.decoding, why_not="")
    row |= {"relative_error": errors.output, "right": errors.wrong is None, "why_not": errors.wrong}
    if not inputs.decoding:
        row["gradient_error"] = errors.gradient
    if errors.wrong is not None:
        return row
    row |= _times(attention, (query, key, value), grad)
    if grad is not None:
        row["nominal_tflops"] = 3.5 * 4 * d * (b * h * n * (n + 1) // 2) / whole_ms(row) / 1e9
    if peer.name == "ours" and inputs.decoding:
        row |= _bytes_read(query, key, value, slopes)
    elif peer.name == "ours" and grad is not None:
        scores, plan = device_plan(query, key, value, slopes)
        with torch.no_grad():
            plan_ms = device_ms(plan, key.device)
        of_backward = computed_scores(query, key, value, slopes, backend="fused", backward=True)
        row |= {"plan_share": plan_ms / number(row["forward_ms"]), "measured_share": of_backward / scores}
        row["computed_tflops"] = 4 * d * (scores + 2.5 * of_backward) / whole_ms(row) / 1e9
    return row


def _times(attention: Attention, inputs: Sequence[Tensor], grad: Tensor | None) -> dict[str, float]:
    """The columns of a training step if `grad` is given, else of a forward pass without gradients."""
    device = inputs[0].device
    if grad is None:
        alone = forward_pass(attention, inputs)
        return {"forward_ms": device_ms(alone, device), "host_us": host_us(alone, device)}
    leaves = [x.detach().requires_grad_() for x in inputs]
    step = training_step(attention, inputs, grad)
    forward_ms = device_ms(lambda: attention(*leaves), device)
    return step_times(forward_ms, device_ms(step, device), host_us(step, device))


def _bytes_read(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Row:
    """Bytes of keys and values: in the tiles that are read, within reach, and in total."""
    tiles, bounds = tiles_of_a_step(query, key, value, slopes)
    least = int(bounds.left.clamp(max=key.shape[2]).sum()) + int((bounds.outlier_tiles >= 0).sum()) * TILE
    row_bytes = 2 * key.shape[-1] * key.element_size()
    rows = {"read": tiles * TILE, "least": least, "all": key.shape[:3].numel()}
    return {f"bytes_{name}": count * row_bytes for name, count in rows.items()}
