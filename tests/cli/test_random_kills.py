"""`alibi run` and `alibi embed` survive 50 kills at random moments, with bit-identical results."""

import json
import os
import sys
from pathlib import Path

import pytest
from programs import printed

SUPPORT = Path(__file__).parent.parent / "support"
KILLS = 50


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL and no fork")
@pytest.mark.parametrize("what", ["run", "resumed", "embed"])
def test_killed_at_random_moments_the_results_are_those_of_an_undisturbed_run(what: str, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": os.pathsep.join([str(SUPPORT / "oracles"), os.environ.get("PYTHONPATH", "")])}
    program = SUPPORT / "processes" / "random_kills.py"
    told = json.loads(printed(program, what, tmp_path, KILLS, timeout=3000, OMP_NUM_THREADS="1", **variables))
    assert told["kills"] >= KILLS
    assert told["ended"] >= 1
    assert told["different"] == []
