"""`alibi bench host`: what calls of the Triton kernels cost the host, counted without a device."""

import os
import subprocess
import sys

import pytest

from alibi_lab import records
from alibi_lab.measure.absent_device import record as record_launch

# The most launches of our kernels, and operations of torch that launch a kernel, per call.
MOST_LAUNCHES = {"plain": (4, 7), "symmetric, masked": (6, 9), "gates": (7, 12), "SDPA": (0, 0)}
MOST_LAUNCHES |= {"decoding": (4, None), "decoding, growing": (4, None), "decoding, forgetting": (24, None)}
MOST_OPERATIONS = {
    "plain": (0, 0),
    "symmetric, masked": (0, 3),
    "gates": (0, 6),
    "decoding": (0, None),
    "decoding, growing": (2, None),  # the key and the value are written
    "decoding, forgetting": (16, None),  # those of eight groups of heads
    "SDPA": (1, 2),
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> records.Record:
    """Measured in a process of its own, in which tensors say that they are on a device."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("records")
    command = [sys.executable, "-W", "ignore", "-m", "alibi_lab", "bench", "host", "--seconds", "0.001", "--out", out]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (path,) = out.iterdir()
    return records.load(path)


@pytest.mark.parametrize("kind", MOST_LAUNCHES)
def test_a_call_takes_few_launches_and_operations(record: records.Record, kind: str) -> None:
    measured = record.curves[kind]
    for most, of in ((MOST_LAUNCHES, "launches"), (MOST_OPERATIONS, "operations")):
        for way, allowed in zip(("forward", "training"), most[kind], strict=True):
            if allowed is None:
                assert f"{way}_{of}" not in measured
            else:
                (count,) = measured[f"{way}_{of}"]
                assert count <= allowed, f"{kind}: {way} takes {count} {of}"


def test_launches_operations_and_allocations_are_counted(record: records.Record) -> None:
    assert record.curves["plain"]["training_launches"][0] >= 4
    assert record.curves["plain"]["training_allocations"][0] >= 5  # output, lse and three gradients
    assert record.curves["SDPA"]["forward_operations"] == [1]


def test_an_empty_grid_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"forward is launched with a grid of \(0, 1, 1\)"):
        record_launch([], "forward", (0, 1, 1), ())
