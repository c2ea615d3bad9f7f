"""What no formula can compute is kept away from it, once for all: bad numbers, products that overflow, queries without a key.

Kernels get finite numbers too, with memory linear in the length: `operators/finite_numbers.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.backends.protocol import Pairs, Result, Spec
from alibi_attn.attention.call.bias import score_bias, unshifted_lse
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.call.visibility import distances, may_see_nothing, per_query_head, visible
from alibi_attn.attention.operators.finite_numbers import MODERATE_SCALE, are_moderate
from alibi_attn.attention.run import few_queries

Run = Callable[[Spec, Tensor, Tensor, Tensor], Result]
Formula = Callable[[Spec, Tensor, Tensor, Tensor, Pairs], Result]


class Guarded(NamedTuple):
    """A call that a formula can compute.

    A query that sees no key gets zeros and sees all keys; its result becomes 0 and −inf. Keys that no query sees are zeros, so
    that NaN in them has no effect. Other keys with NaN or inf are zeros too, and NaN is added to the queries that see them.

    Args:
        origin: of `score_bias`.
        blind: [B|1, H|1, T, 1] bool: the queries that see no key; None = every query sees one.
        poison: of `without_bad_keys`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pairs: Pairs
    origin: Tensor | None
    blind: Tensor | None
    poison: Tensor | None

    def result(self, spec: Spec, output: Tensor, lse: Tensor | None) -> Result:
        """(output, lse) of the call, from those of the formula."""
        lse = None if lse is None else unshifted_lse(spec, lse, self.origin)
        if self.blind is not None:
            output = output.masked_fill(self.blind, 0.0)
            lse = None if lse is None else lse.masked_fill(self.blind.squeeze(-1), float("-inf"))
        if self.poison is not None:
            output = output + self.poison[..., None].to(output.dtype)
            lse = None if lse is None else lse + self.poison
        return output, lse


def guarded(formula: Formula, *, slow: frozenset[str] | None = None) -> Run:
    """How a formula of `backends/protocol.py` runs.

    Args:
        slow: compute few queries by `few_queries.py` if their numbers are finite and the call uses none of these fields.
    """

    def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> Result:
        distance = distances(spec.query_len, spec.key_len, spec.query_offset, query.device)
        seen = visible(spec, distance)
        bias, origin = score_bias(spec, distance, seen)
        few = slow is not None and few_queries.are_few(spec, query, key, value, bias)
        if few and not (slow and spec.used() & slow):
            found = few_queries.attend(spec, query, key, value, bias)
            if found is not None:
                output, lse = found
                return output.to(query.dtype), None if lse is None else unshifted_lse(spec, lse, origin)
        call = guard(spec, query, key, value, seen, (bias, origin))
        output, lse = call.result(spec, *formula(spec, call.query, call.key, call.value, call.pairs))
        return output.to(query.dtype), lse

    return run


def guard(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, bias: tuple[Tensor, Tensor | None]
) -> Guarded:
    """The call without what a formula cannot compute; `seen` comes from `visible`, and (bias, origin) from `score_bias`."""
    key, value, poison, moderate = without_bad_keys(spec, seen, key, value)
    moderate = moderate and not _may_overflow(spec, query)
    numbers, blind = bias[0], None
    if may_see_nothing(spec):
        blind = ~seen.any(-1, keepdim=True)
        numbers, query = numbers.masked_fill(blind, 0.0), query.masked_fill(blind, 0.0)
    return Guarded(query, key, value, Pairs(numbers, seen, moderate), bias[1], blind, poison)


def without_bad_keys(
    spec: Spec, seen: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """(key, value, poison, moderate): zeroes keys that no query sees, and keys with NaN or inf in them or in their values.

    Matrix products touch every key, and 0·NaN is NaN: otherwise a NaN in a hidden key would reach every query.

    Returns:
        key, value: [B, K, S, D], finite.
        poison: [B, H, T] fp32, NaN if the query sees NaN or inf and 0 otherwise, to be added to the result; None if no
            key is bad, which is checked only if reading is free (see `transforms.may_read`).
        moderate: False if keys that only some queries see hold numbers so large that products with them may overflow, also for
            the other queries; checked only if reading is free.
    """
    readable = may_read(key, value)
    if readable and are_moderate(key, value):
        return key, value, None, True
    # `vector_norm` is twenty times slower on a transposed view.
    largest = [x.detach().abs().amax(-1) for x in (key, value)]
    bad = ~(largest[0].isfinite() & largest[1].isfinite())
    of_head = per_query_head(spec, bad)[..., None].to(torch.float32)
    spoiled = (seen.to(torch.float32) @ of_head).squeeze(-1) > 0
    poison = torch.zeros(spoiled.shape, device=key.device).masked_fill(spoiled, float("nan"))
    used = seen.any(-2).expand(spec.batch, spec.num_heads, -1).unflatten(1, (-1, spec.group)).any(2)
    unused = (bad | ~used)[..., None]
    key, value = key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)
    return key, value, poison, not readable or are_moderate(key, value)


def _may_overflow(spec: Spec, query: Tensor) -> bool:
    """Whether scores of moderate keys, hidden ones too, may overflow; checked only if reading values is free."""
    return may_read(query) and (abs(spec.scale) > MODERATE_SCALE or not are_moderate(query))
