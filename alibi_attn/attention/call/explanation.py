"""`Explanation`, the result of `explain` in PyTorch and JAX: a call, its backend, the reach of each head, the certified bound."""

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.attention.call.reads import MASKS, PARTS, SPACE, Reads
from alibi_attn.attention.call.spec import AttentionSpec

Spec = AttentionSpec[Any]

# The words for each field in the line about the call.
WORDS: dict[str, Callable[[Spec], str]] = {
    "window": lambda spec: f"window {spec.window}",
    "head_windows": lambda spec: "a window per head",
    "sinks": lambda spec: f"{spec.sinks} sinks",
    "prefix_len": lambda spec: "prefix",
    "positions": lambda spec: "positions",
    "coordinates": lambda spec: "positions in the plane or in space",
    "registers": lambda spec: f"{spec.registers} registers",
    "key_mask": lambda spec: "key mask",
    "key_segments": lambda spec: "segments",
    "key_bias": lambda spec: "key bias",
    "sink_logits": lambda spec: "sink logits",
    "dropout_p": lambda spec: f"dropout {spec.dropout_p}",
}
# The others go with one of these, or show in the numbers.
READS = Reads("explain", frozenset(WORDS) | MASKS | PARTS | SPACE | {"dropout_seed"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation:
    """Describes how `alibi_attention` would run a call. `print` shows it as text, a notebook as a table.

    Attributes:
        call: shapes, dtype, device and masks, in one line.
        backend: the name of the backend that runs.
        verdicts: for each backend, that it runs, that it could run, or why it cannot.
        slopes: [H] or [B, H].
        reaches: [B, H] int64, as `head_reach` returns them.
        scores: [B, H] int64, the number of scores that are computed.
        measured_reaches, measured_scores: the same for backward, where forward measures what matters; None = as forward.
        visible: the number of query-key pairs that the masks allow, over all heads; None if the backend skips no key.
        pairs: T·S.
        tolerance: the largest share of a query's softmax mass that skipped keys hold.
        output_error: by how much an output may be off before rounding, relative to max‖v‖.
    """

    call: str
    backend: str
    verdicts: dict[str, str]
    slopes: NDArray[np.floating]
    reaches: NDArray[np.integer]
    scores: NDArray[np.integer]
    visible: int | None
    pairs: int
    tolerance: float
    output_error: float
    measured_reaches: NDArray[np.integer] | None = None
    measured_scores: NDArray[np.integer] | None = None

    @property
    def shares(self) -> NDArray[np.floating]:
        """[H]: the share of T·S that each head computes."""
        batch, _ = self.scores.shape
        shares: NDArray[np.floating] = self.scores.sum(0) / max(batch * self.pairs, 1)
        return shares

    @property
    def share(self) -> float:
        """The share of B·H·T·S that is computed."""
        return int(self.scores.sum()) / max(self.scores.size * self.pairs, 1)

    def __repr__(self) -> str:
        reaches = self.reaches.tolist()
        low, high = min(map(min, reaches), default=0), max(map(max, reaches), default=0)
        reach = f"{low}" if low == high else f"{low} to {high}"
        return f"<Explanation: {self.backend} runs, reach {reach}, {self.share:.1%} of T·S>"

    def __str__(self) -> str:
        lines = [self.call, *(f"  {name:<10} {verdict}" for name, verdict in self.verdicts.items())]
        if self.visible is not None:
            lines.append("head       slope     reach   share of T·S  measured")
            lines += ["{:>4} {:>11} {:>9} {:>14} {:>9}".format(*row) for row in self._heads()]
        return "\n".join([*lines, *self._totals()])

    def _repr_html_(self) -> str:
        verdicts = "".join(f"<li><b>{name}</b> {html.escape(text)}</li>" for name, text in self.verdicts.items())
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in self._heads())
        table = f"<table><tr><th>head</th><th>slope</th><th>reach</th><th>share of T·S</th><th>measured</th></tr>{rows}</table>"
        totals = "".join(f"<p>{html.escape(line)}</p>" for line in self._totals())
        return f"<p>{html.escape(self.call)}</p><ul>{verdicts}</ul>{'' if self.visible is None else table}{totals}"

    def _heads(self) -> list[tuple[int, str, int, str, int | str]]:
        """(head, slope, reach, share, measured reach) of each head, with the largest slope and reaches of the batch."""
        slopes = self.slopes.reshape(-1, self.scores.shape[1]).max(0, initial=-np.inf)
        reaches = self.reaches.max(0, initial=0)
        measured = (
            [""] * len(reaches) if self.measured_reaches is None else self.measured_reaches.max(0, initial=0).tolist()
        )
        return [
            (h, f"{float(slope):.6g}", int(reach), f"{share:.1%}", own)
            for h, (slope, reach, share, own) in enumerate(zip(slopes, reaches, self.shares, measured, strict=True))
        ]

    def _totals(self) -> list[str]:
        if self.visible is None:
            return [f"{self.backend} computes all {self.pairs:,} scores of every head and skips nothing"]
        computed = int(self.scores.sum())
        allowed = self.visible / max(self.scores.size * self.pairs, 1)
        totals = [
            f"scores computed: {computed:,} = {self.share:.1%} of T·S "
            f"({'tiles round up; ' if computed > self.visible else ''}the masks alone leave {allowed:.1%})",
            f"certified: the skipped keys hold at most {self.tolerance:.2g} of any query's softmax mass, "
            f"so an output changes by at most {self.output_error:.2g}·max‖v‖ before rounding",
        ]
        if self.measured_scores is not None:
            totals.append(
                "measured: backward knows these scores, so its reach may be shorter (column measured); it computes "
                f"{int(self.measured_scores.sum()) / max(computed, 1):.1%} of them, with the same bound"
            )
        return totals


def explanation(
    spec: Spec,
    dtype: object,
    device: object,
    backend: str,
    verdicts: dict[str, str],
    largest: NDArray[np.integer],
    slopes: NDArray[np.floating],
    visited: tuple[Sequence[NDArray[np.integer]], int] | None,
) -> Explanation:
    """The `Explanation` of a validated call.

    Args:
        backend, verdicts: the backend that runs, and the verdict on each.
        largest: [B, H], one more than the largest distance in the call.
        slopes: [H] or [B, H].
        visited: the numbers of `Backend.visits`, each [B, H], and the number of visible pairs; None = computes all scores.
    """
    READS.check(spec)
    used = spec.used()
    call = (
        f"B={spec.batch} H={spec.num_heads} K={spec.num_kv_heads} T={spec.query_len} S={spec.key_len} D={spec.head_dim}, "
        f"{dtype_name(dtype)} on {device}, "
        + ", ".join(
            [
                "causal" if spec.causal else "both directions",
                *(words(spec) for name, words in WORDS.items() if name in used),
            ]
        )
    )
    heads, pairs = (spec.batch, spec.num_heads), spec.query_len * spec.key_len
    (reaches, scores, *measured), visible = visited or ((largest, np.full(heads, pairs)), None)
    measured_reach, measured_scores = measured or (None, None)
    return Explanation(
        call=call,
        backend=backend,
        verdicts=verdicts,
        slopes=slopes,
        reaches=np.minimum(reaches, largest),
        scores=scores,
        visible=visible,
        pairs=pairs,
        tolerance=spec.tolerance,
        output_error=2 * spec.tolerance / (1 - spec.dropout_p),
        measured_reaches=None if measured_reach is None else np.minimum(measured_reach, largest),
        measured_scores=measured_scores,
    )


def refusal(backend: str, reason: str) -> ValueError:
    """The error for a backend that cannot run a call."""
    remedy = "no backend can" if backend == "auto" else "backend='auto' picks one that can"
    return ValueError(f"backend {backend!r} cannot run this: {reason}; {remedy}")


def verdict_on(name: str, runs: str, backend: str, reason: str | None, otherwise: str) -> str:
    """The verdict on a backend: `runs` runs, the caller's argument was `backend`, and `reason` is why this one cannot."""
    if name == runs:
        return "runs (picked by auto)" if backend == "auto" else "runs (named by the caller)"
    return otherwise if reason is None else f"cannot: {reason}"
