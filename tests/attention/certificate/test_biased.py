"""The certificate of biased keys, in torch operations: attacks on it, and how many tiles are visited."""

import math

import pytest
import torch
from certificate_attack import keys_of_tiles
from halo_checks import scores
from key_losses import (
    LENGTH,
    TOLERANCE,
    assert_keys_keep_their_weight,
    gates,
    growing_queries,
    largest_loss,
    lost_weight,
)

from alibi_attn import alibi_slopes
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances
from alibi_attn.attention.certificate import biased
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import key_tiles


def share_visited(key_bias: torch.Tensor, slopes: list[float], **options: object) -> float:
    """Share of visited tiles, for 1,024 random queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 1024, 32, generator=generator).unbind(0)
    spec = make_spec(q, k, k, slopes, key_bias=key_bias, **options)
    tiles = key_tiles(spec, biased.biased_bounds(spec, q, k, k), rows=TILE)
    return float(tiles.weight.sum()) / (2 * (1024 // TILE) ** 2)


def test_a_constant_gate_is_a_slope() -> None:
    q, k, v = torch.randn(3, 1, 4, 1000, 16, generator=torch.Generator().manual_seed(1)).double().unbind(0)
    slopes = torch.tensor(alibi_slopes(4))
    gates = slopes[:, None] * torch.arange(1000)
    sloped = make_spec(q, k, v, slopes, key_bias=torch.zeros(1000).double())
    gated = make_spec(q, k, v, torch.zeros(4), key_bias=gates)
    ours, theirs = (biased.biased_bounds(spec, q, k, v) for spec in (gated, sloped))
    assert torch.equal(ours.left, theirs.left)
    assert int(ours.left[0, 0].min()) < 500


@pytest.mark.parametrize("shift", [0.0, 1e6, -1e6])
def test_gates_shorten_the_reach_whatever_the_slope_and_however_large_they_are(shift: float) -> None:
    gates = torch.full((2, 1024), 0.5, dtype=torch.float64).cumsum(-1) + shift
    assert share_visited(gates, [0.0, 0.0]) < 0.2
    assert share_visited(gates, [-0.25, 0.1]) < 0.2
    assert share_visited(-gates, [1.0, 1.0], causal=False) < 0.3


def test_spikes_cost_a_few_tiles() -> None:
    gates = torch.full((2, 1024), 0.5).cumsum(-1)
    spiked = gates.clone()
    spiked[:, [40, 300]] += 900.0
    assert share_visited(spiked, [0.0, 0.0]) < share_visited(gates, [0.0, 0.0]) + 0.1


def test_nothing_is_skipped_without_a_bound() -> None:
    """NaN in a query or a visible key, or a query whose near keys are all hidden; a hidden NaN has no effect."""
    q, k, v = torch.randn(3, 1, 2, 1024, 16, generator=torch.Generator().manual_seed(2)).unbind(0)
    gates = torch.full((2, 1024), 0.5).cumsum(-1)
    bad_key, bad_query, hidden = k.clone(), q.clone(), gates.clone()
    bad_key[0, 0, 500], bad_query[0, 0, 600] = math.nan, math.nan
    plain = biased.biased_bounds(make_spec(q, k, v, [0.0] * 2, key_bias=gates), q, k, v).left
    found = biased.biased_bounds(make_spec(bad_query, k, v, [0.0] * 2, key_bias=gates), bad_query, k, v).left
    assert bool((found[0, 0, 600 // TILE] > 1024).all())
    assert torch.equal(found[0, 1], plain[0, 1])
    found = biased.biased_bounds(make_spec(q, bad_key, v, [0.0] * 2, key_bias=gates), q, bad_key, v).left
    assert bool((found[0, 0] > 1024).all())
    hidden[:, 500] = -math.inf
    found = biased.biased_bounds(make_spec(q, bad_key, v, [0.0] * 2, key_bias=hidden), q, bad_key, v).left
    assert int(found[0, 0, 1:].min()) < 512
    hidden[:, 512 : 512 + 128] = -math.inf
    found = biased.biased_bounds(make_spec(q, k, v, [0.0] * 2, key_bias=hidden), q, k, v).left
    assert bool((found[0, :, 9] > 1024).all())


def test_gates_leave_every_key_its_weight() -> None:
    """A limit per query alone lets key 0 lose many times what the key rule allows."""
    query, key, value = growing_queries(0.2 * TOLERANCE)
    spec = make_spec(query, key, value, [0.0], scale=1.0, tolerance=TOLERANCE, key_bias=gates())
    score, distance = scores(query, key, [0.0], spec=spec), distances(LENGTH, LENGTH, 0, None)
    of_queries, of_keys = (keys_of_tiles(spec, query, key, value, for_gradients=x) for x in (False, True))
    assert float(lost_weight(of_queries, score).max()) > 3 * largest_loss(TOLERANCE, LENGTH)
    assert_keys_keep_their_weight(of_keys, score, distance, TOLERANCE)


def test_the_limit_at_a_key_does_not_depend_on_padding_or_on_other_texts() -> None:
    """Distances count from the first visible key of a query's text."""
    query, key, value = torch.randn(3, 1, 2, 1024, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    bias = 0.05 * torch.arange(1024, dtype=torch.float64)
    tensors = query, key, value
    alone = keys_of_tiles(make_spec(*tensors, [0.0] * 2, key_bias=bias), *tensors, for_gradients=True)
    assert not alone[:, :, -1, 0].any()
    tensors = [torch.nn.functional.pad(x, (0, 0, 640, 0)) for x in tensors]
    bias, at = torch.nn.functional.pad(bias, (640, 0)), torch.arange(1664)[None]
    padded = make_spec(*tensors, [0.0] * 2, key_bias=bias, key_mask=at >= 640)
    assert torch.equal(keys_of_tiles(padded, *tensors, for_gradients=True)[:, :, 640:, 640:], alone)
    second = make_spec(*tensors, [0.0] * 2, key_bias=bias, segment_ids=(at >= 640).long())
    shown = torch.ones(1, 1, 1664, dtype=torch.bool)
    left, _ = biased._farthest_keys(second, shown, torch.zeros(1, dtype=torch.int64))
    assert left[0, 0].tolist() == [64 * n + 63 for n in (*range(10), *range(16))]
