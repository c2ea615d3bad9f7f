"""Devices that no backend was made for, such as Apple's `mps`, get `dense`, also if they have no fp64."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "another_device.py"


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_a_device_that_only_dense_runs_on_gives_the_definition(cases: str) -> None:
    """In a process of its own: torch keeps a registered device until the end of the process."""
    command = [sys.executable, "-W", "error", str(SCRIPT), cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= (130 if cases == "all" else 20), "comparisons"
