"""Context parallelism under torchrun, with and without accelerate: unequal shards, a rank that hangs or exits."""

from pathlib import Path

import pytest
from programs import printed

PROGRAM = Path(__file__).parent.parent / "support" / "processes" / "context_launched.py"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]


@pytest.mark.parametrize("start", [pytest.param("torch", marks=pytest.mark.long), "accelerate"])
def test_a_launched_group_computes_unequal_shards_and_reports_lost_ranks(start, tmp_path):
    """torchrun starts both cases, as `accelerate launch --multi_gpu` does; with --cpu that starts one process."""
    printed(*LAUNCHER, PROGRAM, tmp_path, start, timeout=200, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"equal-{rank}.txt").read_text() for rank in range(3)] == ["True"] * 3
    hanging, dead = (tmp_path / "errors.txt").read_text().splitlines()
    assert hanging.startswith("True rank 0 of 3: exchanging arguments did not finish within 1.5 s")
    assert "another rank hangs" in hanging
    assert dead.startswith("True rank 0 of 3: exchanging arguments failed after ")
    assert "another rank has exited or lost its connection" in dead
    assert "120 s" not in dead
