"""Attacks what backward leaves out, and measures its share of the softmax in float64; `keys_attack.py` is a program that does
so for keys.
"""

import contextlib
import dataclasses
import math
import unittest.mock
from collections.abc import Callable, Iterable

import torch
from certificate_attack import Attack, distances_of, keys_of, lost_shares, read_keys, seen_keys
from key_losses import largest_loss

from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.banded import pieces as banded_pieces
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import SCORE_UNITS


def native_keys(spec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """[B, H, T, S] each: the keys that forward visits, and those that backward visits."""
    visited = native.visited(spec, query, key, value)
    return [keys_of(visited, spec), keys_of(visited.for_backward, spec)]


def banded_keys(spec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The same, with sections of 64 keys at every length."""
    with sections_at_every_length():
        return [read_keys(spec, pieces) > 0 for pieces in banded.visited(spec, query, key, value)]


def sections_at_every_length() -> contextlib.AbstractContextManager[object]:
    """In this context `banded` measures sections of 64 keys at every length."""
    return unittest.mock.patch.multiple(banded_pieces, LONG=0, NARROWEST=64, NEAR_SECTIONS=1)


def fused_keys(spec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The same, in a process with Triton's interpreter."""
    import measured_in_interpreter

    return list(measured_in_interpreter.visited(spec, query, key, value)[:2])


KEYS = {"native": native_keys, "banded": banded_keys, "fused": fused_keys}


def left_out_by_backward(
    attack: Attack, measured_at: float | None = None, keys: Callable[..., list[torch.Tensor]] = native_keys
) -> tuple[float, float, float]:
    """What backward leaves out of the keys that forward visited.

    Args:
        measured_at: a tolerance for the backend other than the attack's.
        keys: the keys of its forward and of its backward.

    Returns:
        (the largest share of a query's softmax over these keys; the share of these keys; the nats that a score may be off by)
    """
    if keys is fused_keys:  # in dtypes of the interpreter
        other = {"float64": "float16", "bfloat16": "float32"}
        attack = dataclasses.replace(attack, dtype=other.get(attack.dtype, attack.dtype))
    (query, key, value, slopes), kwargs = attack.inputs()
    spec = make_spec(query, key, value, slopes, **kwargs)
    with torch.no_grad():
        computed = dataclasses.replace(spec, tolerance=measured_at or spec.tolerance)
        forward, backward = keys(computed, query, key, value)
    lost, share = lost_shares(spec, query, key, seen_keys(spec) & forward, backward)
    return lost, share, rounding(spec, query, key)


def losses(attacks: Iterable[Attack], keys: Callable[..., list[torch.Tensor]], careless: float = 1.0) -> list[float]:
    """The largest share of a query's softmax that backward leaves out, relative to what the key rule allows, of every draw in
    which it leaves out a key; with a tolerance that is `careless` times the attack's."""
    found = []
    for attack in attacks:
        lost, share, off = left_out_by_backward(attack, careless * attack.tolerance, keys)
        if off < 0.5 and share > 0:  # shares are those of the computed scores
            found.append(64 * lost / largest_loss(attack.tolerance, attack.length) / math.exp(2 * off))
    return found


def rounding(spec, query: torch.Tensor, key: torch.Tensor) -> float:
    """The nats that a computed score may be off by."""
    unit = 2.0**-53 if query.dtype == torch.float64 else 2.0**-24
    largest = abs(spec.scale) * float(query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max())
    steepest = float(torch.stack([x.abs().max() for x in (spec.slopes, spec.right_slopes) if x is not None]).max())
    biases = steepest * float(distances_of(spec).abs().max())
    if spec.key_bias is not None:
        finite = spec.key_bias[spec.key_bias > -math.inf]
        biases += float(finite.amax() - finite.amin()) if len(finite) else 0.0
    return unit * ((spec.head_dim + SCORE_UNITS) * (1 + largest) + 8 * biases)
