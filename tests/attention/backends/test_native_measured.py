"""What the C++ kernels leave out because forward measured it: backward's tiles, and tiles that forward does not weigh."""

import dataclasses

import pytest
import torch
from certificate_attack import dropped, native_keys, random_attack
from measured_attack import losses
from measured_attack import native_keys as native_rows

from alibi_attn import alibi_attention
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.call.validation import make_spec

SLOPES = [2.0, 0.5, 0.1, 0.02]


@pytest.mark.parametrize("biased", [False, True])
def test_what_backward_leaves_out_weighs_at_most_a_part_of_the_tolerance(biased: bool) -> None:
    """By the key rule tile n on a side has at most a 128th of tolerance / n, so N tiles at most 1 + ln N times as much."""
    attacks = [random_attack(seed, biased=biased) for seed in range(120)]
    attacks[::10] = [dataclasses.replace(attack, length=attack.length * 4) for attack in attacks[::10]]
    found = losses(attacks, native_rows)
    assert max(found) <= 1
    assert len(found) >= 18, "an attack on nothing: too few draws leave out a key"
    few = (attack for attack in attacks[1:30] if attack.tolerance < 0.001)
    assert max(losses(few, native_rows, careless=300.0)) > 1, "three hundred times the tolerance is not detected"


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


def test_a_tolerance_of_zero_leaves_out_nothing() -> None:
    q, k, v = 10 * torch.randn(3, 1, 4, 400, 16)
    visited = native.visited(make_spec(q, k, v, SLOPES, tolerance=0.0), q, k, v)
    assert (visited.keys[..., 0] == 0).all()
    assert (visited.kept == visited.keys[..., :2]).all()
    alibi_lse = alibi_attention(q, k, v, SLOPES, tolerance=0.0, return_lse=True, backend="native")[1]
    full = alibi_attention(*(x.double() for x in (q, k, v)), SLOPES, return_lse=True, backend="reference")[1]
    torch.testing.assert_close(alibi_lse.double(), full, rtol=1e-6, atol=2e-5)
