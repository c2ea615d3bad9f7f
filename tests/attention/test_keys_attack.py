"""The attack on the gradients of keys finds what is lost, allows what the key rule allows, and knows what backward visits."""

import dataclasses
import math

import pytest
import torch
from keys_attack import (
    BACKENDS,
    CERTIFIED,
    MEASURED,
    Backend,
    KeyAttack,
    grad_norms,
    losses,
    nearest_distances,
    random_attack,
    shares_of,
    untrue,
)

from alibi_attn.attention.call.visibility import distances, visible

PLAIN = KeyAttack(
    seed=2,
    length=64 * 9 + 1,
    head_dim=4,
    slope=0.0,
    tolerance=0.01,
    where="nothing",
    mask="none",
    causal=False,
    group=2,
    log_query=-1.7,
    log_key=-1.7,
    log_giant=0.0,
)


def all_keys(spec, query, key, value) -> list[torch.Tensor]:
    return [torch.ones(1, spec.num_heads, spec.query_len, spec.key_len, dtype=torch.bool) for _ in range(2)]


def all_but_the_last(spec, query, key, value) -> list[torch.Tensor]:
    """As a limit per query does: the last tile holds one key of an ordinary share, which every query may leave out."""
    forward, backward = all_keys(spec, query, key, value)
    backward[..., -1] = False
    return [forward, backward]


def as_the_rule_says(spec, query, key, value) -> list[torch.Tensor]:
    """Backward leaves out a tile if its share is small enough for every query of the block."""
    forward, backward = all_keys(spec, query, key, value)
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    seen = visible(spec, distance).expand(1, spec.num_heads, -1, -1)
    far = nearest_distances(distance[0], torch.arange(spec.query_len), Backend(as_the_rule_says))
    for h in range(spec.num_heads):
        share = shares_of(spec, h, (query[0, h], key[0, h // spec.group]), (distance[0], seen[0, h]))
        for row in range(0, spec.query_len, 64):
            for tile in range(0, spec.key_len, 64):
                of_tile = share[row : row + 64, tile : tile + 64].sum(-1).max()
                if far[row, tile] > 0 and of_tile <= spec.tolerance / (2 * (far[row, tile] + 64)):
                    backward[0, h, row : row + 64, tile : tile + 64] = False
    return [forward, backward]


def test_a_key_that_every_query_leaves_out_is_found() -> None:
    found = losses(PLAIN, Backend(all_but_the_last))
    assert found.of_weight(MEASURED) == pytest.approx(1.0)
    assert found.of_limit(MEASURED) > 10
    assert found.of_limit(CERTIFIED) == found.of_weight(CERTIFIED) == 0.0


def test_what_the_rule_allows_passes_and_is_little() -> None:
    tolerance, shares = 0.05, []
    for slope, causal in ((0.0, False), (0.01, True), (0.05, True), (0.05, False)):
        for kind in ("uniform", "light tile"):
            changes = {"slope": slope, "causal": causal, "tolerance": tolerance, "kind": kind, "share": 0.003}
            attack = dataclasses.replace(PLAIN, **changes)
            found = losses(attack, Backend(as_the_rule_says))
            largest = float(grad_norms(attack, 2, attack.length).max())
            most = tolerance * (1 + math.log(attack.length / 64)) * attack.group * largest
            assert float(found.lost[MEASURED].max()) <= most
            shares.append(found.of_limit(MEASURED))
    assert 0.01 < max(shares) <= 1


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_the_gradients_lack_what_the_attack_says(backend: str) -> None:
    """So what a backend reports as visited is what its backward visits."""
    one, wrong = BACKENDS[backend], 0
    assert one.gradient is not None
    for seed in range(1, 13):
        attack = random_attack(seed, one)
        found, gradient = losses(attack, one), one.gradient(attack)
        if found.off < 0.5:
            assert untrue(attack, found, gradient) <= 1, attack
            pretended = losses(attack, Backend(all_but_the_last))
            wrong += untrue(attack, pretended, gradient) > 1
    assert wrong > 1
