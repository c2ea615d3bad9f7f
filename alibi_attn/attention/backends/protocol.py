"""The interface of a backend: a module with these names. `dispatch.py` has the table, and mypy checks each entry against this."""

from typing import NamedTuple, Protocol

from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec

Spec = AttentionSpec[Tensor]
Result = tuple[Tensor, Tensor | None]

FEW_QUERIES = 8  # up to this many queries, computing all scores with `dense` is fastest


class TooSmall(NamedTuple):
    """Why `dense` is faster for a call: words with a place for one number. They are separate, because a compiled graph that holds
    the formatted text would be valid for that number only."""

    words: str
    number: int = 0

    def __str__(self) -> str:
        return self.words.format(self.number)


class Visits(NamedTuple):
    """What a call reads, each [B, H] int64.

    Args:
        reach: 1 + the largest |i − j| that is read.
        scores: the number of scores that are computed.
        measured_reach, measured_scores: the same for backward, if forward measures what matters; None = as forward.
    """

    reach: Tensor
    scores: Tensor
    measured_reach: Tensor | None = None
    measured_scores: Tensor | None = None


class Pairs(NamedTuple):
    """What a formula gets about every pair of a query and a key; `run/guards.py` makes it.

    Args:
        bias: [B|1, H, T, S]: the number that is added to the scaled score; −inf if the query may not see the key.
        seen: [B|1, H|1, T, S] bool: the query may see the key.
        are_finite: False if products of rows may overflow, so that hidden scores and weights must not be used as they are.
    """

    bias: Tensor
    seen: Tensor
    are_finite: bool


class Backend(Protocol):
    """One way to compute the same attention: a `Kernel` or a `Formula`.

    Args:
        READS: the fields of a spec that it computes, in addition to those that every call has; it gets no call with others. Sink
            logits are no backend's: they scale its output.
    """

    name: str
    READS: frozenset[str]

    def why_not(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Why it cannot run this call, never why it would be slow; None = it runs."""

    def too_small(self, spec: Spec) -> TooSmall | None:
        """Why "auto" prefers `dense` although this backend could run the call; decided from shapes alone.

        With symbolic lengths from torch.export, `dense` gets only calls that are certainly small; the others are right for all.
        """

    def visits(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> Visits | None:
        """What the call reads; None = everything.

        Without `value` the values are assumed to have similar norms.
        """


class Kernel(Backend, Protocol):
    """A backend that skips keys, and is right for all numbers."""

    def run(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> Result:
        """(output [B, H, T, D] in query's dtype, lse [B, H, T] in fp32 or better, or None if `spec.return_lse` is False)."""


class Formula(Backend, Protocol):
    """A backend that computes every score. `run/guards.py` keeps bad numbers, and queries that see no key, away from it."""

    def formula(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> Result:
        """(output [B, H, T, D], lse [B, H, T] with the given bias, or None if `spec.return_lse` is False)."""
