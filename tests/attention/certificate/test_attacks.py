"""Attacks break no certificate of PyTorch or the C++ kernels, and do break certificates that claim too much."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from certificate_attack import (
    BIASES,
    PARTS,
    Attack,
    dropped,
    keys_of_tiles,
    native_keys,
    native_keys_of_parts,
    random_attack,
)
from dropout_attack import off
from hypothesis import given, settings, target
from searched_attacks import attacks

from alibi_attn.attention.certificate import biased, bounds

Certify = Callable[..., torch.Tensor] | None


def mass(attack: Attack, certify: Certify) -> tuple[float, float]:
    """(The mass that is dropped as a share of the tolerance, the share of keys that are skipped)."""
    lost, share = dropped(attack, certify)
    return lost / attack.tolerance, share


# What measures, what certifies, the kinds of the draws, how many there are, and the fewest that must skip a key.
CERTIFICATES: dict[str, tuple[Callable[..., tuple[float, float]], Certify, dict[str, bool], int, int]] = {
    "torch": (mass, None, {}, 400, 100),
    "torch, biased": (mass, keys_of_tiles, {"biased": True}, 250, 60),
    "native": (mass, native_keys, {}, 250, 80),
    "native, biased": (mass, native_keys, {"biased": True}, 150, 40),
    "native, dropout": (off, native_keys, {}, 150, 50),
    "native, parts": (mass, native_keys_of_parts, {"parts": True}, 120, 20),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_dropped_mass_stays_within_the_tolerance_of_random_attacks(name: str) -> None:
    measure, certify, kinds, draws, least = CERTIFICATES[name]
    skipping, parts, biases = 0, set(), set()
    for attack in (random_attack(seed, **kinds) for seed in range(draws)):
        lost, share = measure(attack, certify)
        assert lost <= 1, attack
        skipping += share > 0
        parts |= {attack.part} if share > 0 else set()
        biases.add(attack.bias)
    assert skipping >= least, "an attack on nothing: too few draws skip a key"
    assert parts == (set(PARTS) if "parts" in kinds else {None})
    assert biases == (set(BIASES) if "biased" in kinds else {None})


@pytest.mark.long
@pytest.mark.parametrize(
    ("certify", "kinds", "draws"),
    [
        (native_keys, {}, range(250, 5000)),
        (native_keys_of_parts, {"parts": True}, range(120, 2000)),
        (native_keys_of_parts, {"parts": True, "biased": True}, range(2000)),
    ],
    ids=["native", "native, parts", "native, parts and biases"],
)
def test_dropped_mass_stays_within_the_tolerance_of_many_attacks(certify: Certify, kinds: Any, draws: range) -> None:
    for attack in (random_attack(seed, **kinds) for seed in draws):
        assert mass(attack, certify)[0] <= 1, attack


@pytest.mark.parametrize("certify", [None, native_keys], ids=["torch", "native"])
@given(attack=attacks)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_search_finds_an_attack_that_drops_more(certify: Certify, attack: Attack) -> None:
    lost, share = mass(attack, certify)
    target(lost, label="share of the tolerance")
    target(share, label="share of keys skipped")
    assert lost <= 1


# How many times the tolerance each may skip, and how many of its draws must show it.
CARELESS = {"native": (30, 6), "native, parts": (30, 4), "native, dropout": (100, 3)}


@pytest.mark.parametrize("name", CARELESS)
def test_a_certificate_that_claims_too_much_is_detected(name: str) -> None:
    (measure, certify, kinds, draws, _), (factor, least) = CERTIFICATES[name], CARELESS[name]

    def careless(spec: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return certify(dataclasses.replace(spec, tolerance=min(0.99, factor * spec.tolerance)), *tensors)

    assert sum(measure(random_attack(seed, **kinds), careless)[0] > 1 for seed in range(draws)) >= least


# What makes a certificate in torch operations claim too much: where, and the wrong result in place of the right one.
WRONG = [
    ("torch", bounds._Blocks, "_reach", lambda found: (found - 4).clamp(min=1)),
    ("torch", bounds, "_tail_nats", lambda found: found - 3.0),
    ("torch", bounds, "lower_bound", lambda found: found + 3.0),
    ("torch, biased", biased, "biased_lower_bound", lambda found: found + 4.0),
    ("torch, biased", biased, "norm_bound", lambda found: found * 0.7),
    # The pinned tiles are neither in the sums nor visited.
    (
        "torch, biased",
        biased,
        "Bounds",
        lambda x: dataclasses.replace(x, outlier_tiles=torch.full_like(x.outlier_tiles, -1)),
    ),
]


@pytest.mark.parametrize(("name", "where", "part", "wrong"), WRONG)
def test_a_wrong_part_of_a_certificate_is_detected(
    name: str, where: Any, part: str, wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (measure, certify, kinds, draws, _), honest = CERTIFICATES[name], getattr(where, part)
    monkeypatch.setattr(where, part, lambda *x, **options: wrong(honest(*x, **options)))
    assert any(measure(random_attack(seed, **kinds), certify)[0] > 1 for seed in range(draws))


@pytest.mark.parametrize("certify", [keys_of_tiles, native_keys])
def test_a_certificate_that_ignores_the_bias_is_detected(certify: Callable[..., torch.Tensor]) -> None:
    def without(spec: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return certify(dataclasses.replace(spec, key_bias=torch.zeros_like(spec.key_bias)), *tensors)

    assert sum(mass(random_attack(seed, biased=True), without)[0] > 1 for seed in range(100)) > 5
