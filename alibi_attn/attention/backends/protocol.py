"""What every backend is: a module with these names. `dispatch.py` has the table of them, and mypy holds each against this."""

from typing import NamedTuple, Protocol

from torch import Tensor

from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]

FEW_QUERIES = 8  # so many are answered fastest by writing their scores out, which `dense` does


class TooSmall(NamedTuple):
    """Why a call is better left to `dense`, in words with one number; apart, since a graph of torch.compile that holds the words
    would be for that number alone."""

    words: str
    number: int = 0

    def __str__(self) -> str:
        return self.words.format(self.number)


class Backend(Protocol):
    """One way to compute the same attention."""

    name: str

    def why_not(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """What it cannot do about this call, never what would be slow; None = it runs."""

    def too_small(self, spec: Spec) -> TooSmall | None:
        """Why "auto" leaves a call to `dense` although this backend could run it; from shapes alone.

        What torch.export leaves open may be small or large: `dense` takes only what is surely small; others are right for all.
        """

    def run(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output [B, H, T, D] in query's dtype, lse [B, H, T] in fp32 or better, or None where `spec.return_lse` is False)."""

    def visits(self, spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """(reach, scores), each [B, H] int64: 1 + the largest |i − j| that is read, and the scores computed; None = everything.

        Without `value` the values are taken to be of like length.
        """
