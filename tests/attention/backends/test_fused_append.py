"""Appending to a static cache on a device: one kernel, which writes what torch operations write on a CPU."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import append_in_interpreter as appending
import pytest
import torch

STEPS: dict[str, tuple[list[int | tuple[int]], dict[str, Any]]] = {
    "across tiles, and cropped": (
        [1, 1, 62, 1, 1, (63,), 1, 130, 5, (0,), 3, 64, 65, (100,), 40],
        {"capacity": 300, "batch": 2, "heads": 2},
    ),
    "padded rows, heads of two sizes": (
        [5, 59, 1, 66, 2],
        {"capacity": 200, "heads": 3, "sizes": (24, 40), "dtype": torch.float16},
    ),
    "too many tokens, some of which fit": ([60, 5, 1, 1, 3], {"capacity": 66}),
    "too many tokens": ([64, 3, 1], {"capacity": 64, "heads": 2}),
}


@pytest.mark.parametrize("name", STEPS)
def test_rows_lengths_and_norms_are_those_of_torch(interpreter: ProcessPoolExecutor, name: str) -> None:
    """Norms may be larger by a few units, never smaller."""
    steps, options = STEPS[name]
    launches = interpreter.submit(appending.appends_as_torch_does, steps, **options).result()
    assert launches == sum(isinstance(step, int) for step in steps)


SLOPES = [4.0, 3.0, 1.5, 0.001]  # the last head needs more than any capacity here


def test_one_kernel_writes_the_rings_of_all_heads(interpreter: ProcessPoolExecutor) -> None:
    """Rings of 8 and 15 tokens are overwritten, also by chunks, which torch operations write."""
    steps = [3, *[1] * 6, 9, *[1] * 4]
    found, whole, launches = interpreter.submit(appending.reach_decodes, steps, capacity=40, slopes=SLOPES).result()
    assert launches == steps.count(1)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_rings_that_are_too_short_give_nan_until_a_new_text(interpreter: ProcessPoolExecutor) -> None:
    steps = [6, 1, 1, 1, 1, 0, 4, 1]
    found, whole, _ = interpreter.submit(appending.reach_decodes, steps, capacity=8, slopes=SLOPES).result()
    torch.testing.assert_close(found[:, :8], whole[:, :8], atol=1e-5, rtol=1e-5)
    assert found[:, 8:10].isnan().all()
    assert found[:, 10:].isfinite().all()
