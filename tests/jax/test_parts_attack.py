"""Attacks on calls in parts in JAX: the mass that they drop, outputs and gradients (`support/fuzz/parts_attack.py`)."""

import numpy as np
import pytest
from parts_attack import LOOP, Call, assert_mass, assert_results, drawn, run

from alibi_attn.jax import attention

FEW = (5, 52, 7)  # positions, windows per head, and positions with large key biases


@pytest.mark.parametrize("seeds", [FEW, pytest.param(range(100), marks=pytest.mark.long)], ids=["few", "many"])
def test_attacked_parts_stay_within_the_tolerance_and_their_errors(seeds) -> None:
    results = [run(drawn(seed), "native") for seed in seeds]
    assert any(skipped > 0 for _, skipped, _ in results), "an attack on nothing: no draw skips a key"
    assert any(shares for *_, shares in results)


@pytest.mark.long
def test_attacked_parts_of_the_loop_stay_within_the_tolerance_and_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUERY_BLOCK", "KEY_TILE"):
        monkeypatch.setattr(attention, name, LOOP["tile"])
    skipped = [run(drawn(seed, loop=True), "loop")[1] for seed in range(12)]
    assert max(skipped) > 0, "an attack on nothing: no draw skips a key"


def test_the_attack_notices_a_careless_certificate_and_wrong_numbers() -> None:
    attack = drawn(52)
    call = Call(attack)
    with pytest.raises(AssertionError, match="is dropped, more than"):
        assert_mass(call, attack, "native", careless=1000.0)  # the key rule drops far less than a limit per query
    call.v = call.v + 1e-4 * np.abs(call.v).max()
    with pytest.raises(AssertionError, match="output is off by"):
        assert_results(call, attack, "native")
