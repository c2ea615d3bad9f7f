"""Devices that no backend was made for, such as Apple's `mps`, get `dense`, also if they have no fp64."""

from pathlib import Path

import pytest
from programs import printed

SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "another_device.py"


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_a_device_that_only_dense_runs_on_gives_the_definition(cases: str) -> None:
    """In a process of its own: torch keeps a registered device until the end of the process."""
    assert int(printed("-W", "error", SCRIPT, cases)) >= (130 if cases == "all" else 20), "comparisons"
