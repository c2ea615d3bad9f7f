"""`alibi run` and `alibi embed` survive 50 kills at random moments, with bit-identical results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"
KILLS = 50


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL and no fork")
@pytest.mark.parametrize("what", ["run", "resumed", "embed"])
def test_killed_at_random_moments_the_results_are_those_of_an_undisturbed_run(what: str, tmp_path: Path) -> None:
    program = [sys.executable, str(SUPPORT / "processes" / "random_kills.py"), what, str(tmp_path), str(KILLS)]
    paths = os.pathsep.join([str(SUPPORT / "oracles"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    result = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["kills"] >= KILLS
    assert told["ended"] >= 1
    assert told["different"] == []
