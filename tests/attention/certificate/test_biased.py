"""The certificate of biased keys, in torch operations: attacks on it, and how many tiles are visited."""

import dataclasses
import math

import pytest
import torch
from certificate_attack import dropped, keys_in_tiles, random_attack
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


def keys_of_tiles(spec, query, key, value, *, for_gradients: bool = False) -> torch.Tensor:
    """[B, H, T, S] bool: the keys in the tiles that each query's block visits."""
    return keys_in_tiles(
        spec, key_tiles(spec, biased.biased_bounds(spec, query, key, value, for_gradients=for_gradients), rows=TILE)
    )


def share_visited(key_bias: torch.Tensor, slopes: list[float], **options: object) -> float:
    """Share of visited tiles, for 1,024 random queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 1024, 32, generator=generator).unbind(0)
    spec = make_spec(q, k, k, slopes, key_bias=key_bias, **options)
    tiles = key_tiles(spec, biased.biased_bounds(spec, q, k, k), rows=TILE)
    return float(tiles.weight.sum()) / (2 * (1024 // TILE) ** 2)


def test_the_certificate_holds_for_biases_that_are_made_to_break_it() -> None:
    skipping = 0
    for seed in range(250):
        attack = random_attack(seed, biased=True)
        if seed % 10 == 0:
            attack = dataclasses.replace(attack, length=attack.length * 5)
        lost, share = dropped(attack, keys_of_tiles)
        assert lost <= attack.tolerance, f"{attack} lost {lost:.3g}"
        skipping += share > 0
    assert skipping > 60


def test_attacks_have_every_kind_of_bias() -> None:
    found = set()
    for seed in range(200):
        kwargs = random_attack(seed, biased=True).inputs()[1]
        bias, segments = kwargs["key_bias"], kwargs["segment_ids"]
        finite = bias[bias > -math.inf]
        steps = bias.diff(dim=-1)
        some = finite.numel() > 0
        kinds = {
            "key of -inf": some and finite.numel() < bias.numel(),
            "not monotone": bool((steps > 0).any() and (steps < 0).any()),
            "gate of exactly 1, gate of -60": bool((steps == 0).any() and (steps == 60).any()),
            "spike of 80": some and 60 < float(finite.max() - finite.median()) < 500,
            "10^6": some and float(finite.abs().max()) >= 1e6,
            "large in another segment": segments is not None and some and _apart(bias[0, 0], segments[0] == 1) > 200,
        }
        found |= {kind for kind, is_there in kinds.items() if is_there}
    assert found == set(kinds)


def _apart(bias: torch.Tensor, inside: torch.Tensor) -> float:
    """The smallest bias inside minus the largest outside."""
    return float(bias[inside].min() - bias[~inside].max()) if inside.any() and not inside.all() else 0.0


@pytest.mark.parametrize("wrong", ["lower bound", "weights", "bias", "outlier tiles"])
def test_a_certificate_that_claims_too_much_is_detected(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    certify = keys_of_tiles
    if wrong == "lower bound":
        honest = biased.biased_lower_bound
        monkeypatch.setattr(biased, "biased_lower_bound", lambda *a: honest(*a) + 4.0)
    elif wrong == "weights":
        norm_bound = biased.norm_bound
        monkeypatch.setattr(biased, "norm_bound", lambda x: norm_bound(x) * 0.7)
    elif wrong == "bias":
        certify = lambda spec, *x: keys_of_tiles(dataclasses.replace(spec, key_bias=spec.key_bias * 0.0), *x)  # noqa: E731
    else:
        _forget_pins(monkeypatch)
    attacks = [random_attack(seed, biased=True) for seed in range(200)]
    finite = [a for a in attacks if wrong != "bias" or a.bias != "hidden"]
    assert sum(dropped(attack, certify)[0] > attack.tolerance for attack in finite) > 0


def _forget_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops the pinned tiles: not in the sums, and not visited."""
    honest = biased.Bounds
    monkeypatch.setattr(biased, "Bounds", lambda left, right, tiles: honest(left, right, torch.full_like(tiles, -1)))


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
