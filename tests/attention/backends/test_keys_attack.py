"""The attack on the gradients of keys finds what is lost, allows what the key rule allows, and knows what backward visits."""

import dataclasses
import math
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from keys_attack import (
    BACKENDS,
    CERTIFIED,
    MEASURED,
    Backend,
    KeyAttack,
    Tally,
    grad_norms,
    losses,
    nearest_distances,
    random_attack,
    run,
    shares_of,
    untrue,
)

from alibi_attn.attention.call.visibility import distances, visible

PLAIN = KeyAttack(2, 64 * 9 + 1, 4, tolerance=0.01, causal=False, group=2, log_query=-1.7, log_key=-1.7)


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


# Draws in which keys lose weight by the certificate, by measured reach, or both, of every kind and dtype; the first are short.
LOSING = (
    28, 62, 115, 123, 169, 174, 182, 188, 386, 486, 504, 533, 575, 595, 627, 682, 723, 837,
    212, 214, 223, 255, 263, 265, 315, 332, 362, 373, 376, 458, 502, 542, 607, 655, 676, 703,
    717, 753, 765, 796, 829,
)  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_no_key_loses_more_than_the_rule_allows(backend: str) -> None:
    assert_none_is_broken(run(backend, LOSING), least=12)


def test_no_key_loses_more_in_the_triton_kernels(interpreter: ProcessPoolExecutor) -> None:
    assert_none_is_broken(interpreter.submit(run, "fused", LOSING[:18]).result(), least=8)


def assert_none_is_broken(tallies: dict[str, Tally], *, least: int) -> None:
    assert not [seed for tally in tallies.values() for seed in tally.broken]
    losing = sum(tally.numbers[f"lose by {by}"] for tally in tallies.values() for by in (CERTIFIED, MEASURED))
    assert losing >= least, f"an attack on nothing: only {losing} times keys lost anything"


def test_a_thousand_times_the_tolerance_is_detected() -> None:
    one, found = BACKENDS["native"], 0
    for attack in (random_attack(seed, one) for seed in LOSING):
        careless = losses(attack, one, min(0.5, 1000 * attack.tolerance))
        found += max(careless.of_limit(CERTIFIED), careless.of_limit(MEASURED)) > 1
    assert found >= 5


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_keys_that_backward_is_said_to_have_left_out_are_missed(backend: str) -> None:
    """So what a backend reports as visited is what its backward visits: `run` compares its gradients with it."""
    one, wrong = BACKENDS[backend], 0
    for attack in (random_attack(seed, one) for seed in range(1, 13)):
        pretended = losses(attack, Backend(all_but_the_last))
        wrong += pretended.off < 0.5 and untrue(attack, pretended, one.gradient(attack)) > 1
    assert wrong > 1
