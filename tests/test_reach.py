"""The certificate in plain numbers, against sums typed out."""

import math

import pytest

from alibi_attn.reach import UNLIMITED, reach, score_bound_of_norms, static_reach, tail_nats


@pytest.mark.parametrize("slope", [2.0**-16, 2.0**-8, 0.1, 0.5, 1.0, 4.0])
def test_the_tail_is_the_geometric_sum(slope: float) -> None:
    terms = math.fsum(math.exp(-slope * d) for d in range(int(60 / slope)))
    assert tail_nats(slope) == pytest.approx(math.log(terms), rel=1e-9)


@pytest.mark.parametrize("slope", [2.0**-8, 0.1, 0.5, 4.0])
@pytest.mark.parametrize("upper", [-3.0, 0.0, 8.0, 300.0])
@pytest.mark.parametrize("tolerance", [2.0**-28, 1e-3, 0.1])
def test_the_reach_is_the_smallest_distance_that_is_certified(slope: float, upper: float, tolerance: float) -> None:
    lower = 1.25
    r = reach(slope, upper, lower, tolerance)

    def mass(distance: int) -> float:
        return math.fsum(math.exp(upper - lower - slope * d) for d in range(distance, distance + int(60 / slope)))

    assert mass(r) <= tolerance * (1 + 1e-9)
    if r > 1:
        assert mass(r - 1) > tolerance * (1 - 1e-9)


@pytest.mark.parametrize(
    "numbers",
    [
        (0.0, 1.0, 0.0, 0.1),
        (-0.5, 1.0, 0.0, 0.1),
        (0.5, 1.0, 0.0, 0.0),
        (0.5, math.inf, 0.0, 0.1),
        (0.5, math.nan, 0.0, 0.1),
        (0.5, 1.0, -math.inf, 0.1),
        (math.nan, 1.0, 0.0, 0.1),
        (5e-324, 1.0, 0.0, 0.1),
    ],
)
def test_inputs_without_a_certificate_have_no_reach(numbers: tuple[float, float, float, float]) -> None:
    assert reach(*numbers) == UNLIMITED


def test_a_static_reach_holds_for_every_query_within_its_bound() -> None:
    upper = score_bound_of_norms(64**-0.5, 64, 1.0, 1.0)
    assert upper == pytest.approx(8.0 * (1 + 2.0**-7 + 80 * 2.0**-24) ** 2)
    r = static_reach(0.5, upper, 2.0**-28)
    assert all(reach(0.5, upper, lower, 2.0**-28) <= r for lower in (-upper, 0.0, upper))
