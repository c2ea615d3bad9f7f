"""What backward of `banded` leaves out because forward measured it; here in sections of 64 keys at every length."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from certificate_attack import random_attack
from measured_attack import banded_keys, losses, sections_at_every_length

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


def test_what_backward_leaves_out_weighs_at_most_a_small_part_of_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section of 64 keys obeys the key rule; a query sums over sections."""
    attacks = [dataclasses.replace(random_attack(seed), length=300 + 17 * seed) for seed in range(45)]
    found = losses(attacks, banded_keys)
    assert max(found) <= 1
    assert len(found) >= 6, "an attack on nothing: too few draws leave out a key"
    monkeypatch.setattr(visited, "largest_share", lambda distance, tolerance: 10 * tolerance)
    assert max(losses(attacks, banded_keys)) > 1, "ten times the tolerance is not detected"


@pytest.mark.parametrize("causal", [True, False])
def test_backward_computes_the_scores_that_explain_shows(
    any_length: None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, fused = 0, banded._fused_backward

    def counted(*args, **kwargs):
        nonlocal count
        (blocks, _, rows, _), keys = args[1].shape, args[2].shape[2]
        count += blocks * (rows * (rows + 1) // 2 if args[7] else rows * keys)
        return fused(*args, **kwargs)

    monkeypatch.setattr(banded, "_fused_backward", counted)
    q, k, v = (x.requires_grad_() for x in draw())
    alibi_attention(q, k, v, SLOPES, causal=causal, backend="banded").sum().backward()
    found = explain(q, k, v, SLOPES, causal=causal, backend="banded")
    assert found.measured_scores is not None
    assert found.measured_reaches is not None
    assert count == found.measured_scores.sum() < 0.98 * found.scores.sum()
    assert (found.measured_reaches <= found.reaches).all()
    share = found.measured_scores.sum() / found.scores.sum()
    assert f"it computes {share:.1%} of them, with the same bound" in str(found)


def test_a_call_without_gradients_reads_fewer_keys(any_length: None) -> None:
    q, k, v = draw()
    training, inference = (explain(x, k, v, SLOPES, backend="banded") for x in (q.clone().requires_grad_(), q))
    assert (inference.scores <= training.scores).all()
    assert inference.scores.sum() < 0.95 * training.scores.sum()
    torch.testing.assert_close(
        alibi_attention(q, k, v, SLOPES, backend="banded"),
        alibi_attention(q.clone().requires_grad_(), k, v, SLOPES, backend="banded").detach(),
    )


def test_a_tolerance_of_zero_leaves_out_nothing(any_length: None) -> None:
    q, k, v = draw()
    spec = make_spec(q, k, v, SLOPES, tolerance=0.0)
    forward, backward = banded_keys(spec, q, k, v)
    assert torch.equal(forward, backward)
    assert banded.visits(spec, q, k, v).measured_scores is None


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
