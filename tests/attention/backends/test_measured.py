"""What backward leaves out because forward measured it (`banded` in sections of 64 keys), and what forward does not weigh."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from certificate_attack import dropped, native_keys, random_attack
from measured_attack import KEYS, losses, sections_at_every_length

from alibi_attn import alibi_attention, explain
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.banded import pieces, visited
from alibi_attn.attention.call.validation import make_spec

SLOPES = [1.0, 0.5, 0.2, 0.1]


@pytest.fixture
def any_length() -> Iterator[None]:
    with sections_at_every_length():
        yield


def draw(t: int = 900, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, t, 16, dtype=dtype)
    return [3 * q, k, v]


# How many attacks of which kinds, and how many of them must leave out a key.
ATTACKED = {"native": (120, {}, 18), "native, biased": (120, {"biased": True}, 18), "banded": (45, {}, 6)}


@pytest.mark.parametrize("name", ATTACKED)
def test_what_backward_leaves_out_weighs_at_most_a_part_of_the_tolerance(name: str) -> None:
    """By the key rule tile n on a side has at most a 128th of tolerance / n, so N tiles at most 1 + ln N times as much."""
    draws, kinds, least = ATTACKED[name]
    keys, attacks = KEYS[name.split(",")[0]], [random_attack(seed, **kinds) for seed in range(draws)]
    if name == "banded":
        attacks = [dataclasses.replace(attack, length=300 + 17 * attack.seed) for attack in attacks]
    else:
        attacks[::10] = [dataclasses.replace(attack, length=attack.length * 4) for attack in attacks[::10]]
    found = losses(attacks, keys)
    assert max(found) <= 1
    assert len(found) >= least, "an attack on nothing: too few draws leave out a key"
    few = (attack for attack in attacks[1:30] if attack.tolerance < 0.001)
    assert max(losses(few, keys, careless=300.0)) > 1, "three hundred times the tolerance is not detected"


def test_forward_leaves_out_at_most_the_tolerance_with_the_tiles_it_did_not_weigh() -> None:
    lost, left_out = 0.0, 0
    for seed in range(100):
        attack = dataclasses.replace(random_attack(seed), dtype="float64", length=500, tolerance=1e-3)
        if max(abs(attack.log_query), abs(attack.log_key)) > 2 or attack.log_giant > 3:
            continue  # log-sum-exps too large for a difference of 1e-3
        (q, k, v, slopes), options = attack.inputs()
        _, full = alibi_attention(
            q, k, v, slopes, **options | {"tolerance": 0.0, "return_lse": True}, backend="reference"
        )
        _, lse = alibi_attention(q, k, v, slopes, **options | {"return_lse": True}, backend="native")
        share = -torch.expm1(torch.where(full.isfinite(), lse - full, 0.0))
        # Beyond the keys that were visited: of tiles whose weights were not computed.
        beyond = dropped(attack, native_keys)[0]
        assert beyond <= 7 / 8 * attack.tolerance
        assert share.max() <= attack.tolerance + 1e-10, attack
        left_out += float(share.max()) > beyond + 1e-10
        lost = max(lost, float(share.max()))
    assert left_out > 5
    assert lost > 1e-4


def test_a_call_without_gradients_reads_fewer_keys(any_length: None) -> None:
    q, k, v = draw()
    training, inference = (explain(x, k, v, SLOPES, backend="banded") for x in (q.clone().requires_grad_(), q))
    assert (inference.scores <= training.scores).all()
    assert inference.scores.sum() < 0.95 * training.scores.sum()
    torch.testing.assert_close(
        alibi_attention(q, k, v, SLOPES, backend="banded"),
        alibi_attention(q.clone().requires_grad_(), k, v, SLOPES, backend="banded").detach(),
    )


@pytest.mark.parametrize("backend", ["banded", "native"])
def test_a_tolerance_of_zero_leaves_out_nothing(backend: str) -> None:
    q, k, v = draw()
    spec = make_spec(q, k, v, SLOPES, tolerance=0.0)
    forward, backward = KEYS[backend](spec, q, k, v)
    assert torch.equal(forward, backward)
    assert bool((forward >= torch.ones(900, 900).tril().bool()).all())


def test_nan_and_unknown_shares_are_heavier_than_any_tolerance() -> None:
    q, k, v = draw(256)
    spec = make_spec(q, k, v, SLOPES, tolerance=0.9)
    row = [pieces.Piece(0, 1, 256, 256, at, 64, 0, merge=at < 192) for at in (192, 128, 64, 0)]
    kept = banded.plan(spec, q, k, v)[0]

    def left(*shares: float | None) -> list[int]:
        full = [None if x is None else torch.full((1, 256), x) for x in shares]
        own = dataclasses.replace(kept, left=torch.full_like(kept.left, 1000))
        visited.narrow(spec, own, 0, 0, pieces=row, shares=full, tolerances=torch.full((4,), 100.0))
        return own.left[0, 0].tolist()

    assert left(None, 0.5, 0.05, 0.04) == [1, 1, 64, 128]  # keys from 128 on
    assert left(None, 0.5, 0.2, 0.04) == [1, 1, 64, 192]  # at a distance of 191 0.2 is too much: keys from 64 on
    assert left(None, 0.5, math.nan, 0.04) == left(None, 0.5, None, 0.04) == [1, 64, 128, 192]
    assert left(None, 0.01, 0.01, math.nan) == [64, 128, 192, 256]


def test_long_far_values_leave_less_room() -> None:
    q, k, v = draw(128)
    spec = make_spec(q, k, v, SLOPES)
    usual = visited.tile_tolerances(spec, v)
    np.testing.assert_allclose(usual.numpy(), 0.99 * spec.tolerance)
    v[:, 1, 0] *= 1e6
    longer = visited.tile_tolerances(spec, v)
    assert longer[0, 1].max() < 1e-4 * spec.tolerance
    assert torch.equal(longer[0, 0], usual[0, 0])
