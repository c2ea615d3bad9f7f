"""Attacks the certificate with dropout: the error that skipped keys cause, in float64."""

import dataclasses
import math
from collections.abc import Callable

import torch
from certificate_attack import Attack, distances_of, seen_keys, shares_of

from alibi_attn.attention.call.dropout import kept
from alibi_attn.attention.call.spec import dropout_numbers
from alibi_attn.attention.call.validation import make_spec


def off(attack: Attack, read_keys: Callable[..., torch.Tensor]) -> tuple[float, float]:
    """(The largest ‖o − õ‖ as a share of 2ε·max‖v‖ / (1 − p), in float64, the share of skipped keys) with dropout.

    `read_keys` returns the visited keys. The error is inf if dropout changes them.
    """
    (query, key, value, slopes), kwargs = attack.inputs()
    plain, p = make_spec(query, key, value, slopes, **kwargs), (0.1, 0.5, 0.9)[attack.seed % 3]
    seed = torch.tensor([[2**40 * attack.seed + 1, 0, 0, 0]])
    spec = dataclasses.replace(plain, dropout_p=p, dropout_seed=seed)
    read, others = (read_keys(x, query, key, value) for x in (spec, plain))
    seen = seen_keys(spec)
    share = float((seen & ~read).sum() / seen.sum().clamp(min=1))
    if not torch.equal(read, others):
        return math.inf, share
    value = value.double()[0]
    value = value / value.norm(dim=-1).max().clamp(min=1e-300)
    factors, errors = kept(spec, query.device)[0] * dropout_numbers(p)[1], []
    for h in range(spec.num_heads):
        pair, distance = (query[0, h], key[0, h // spec.group]), distances_of(spec)[0]
        full, near = (shares_of(spec, h, pair, (distance, x[0, h])) for x in (seen, seen & read))
        errors.append((((full - near) * factors[h]) @ value[h // spec.group]).norm(dim=-1).max())
    return float(torch.stack(errors).max()) * (1 - p) / (2 * spec.tolerance), share
