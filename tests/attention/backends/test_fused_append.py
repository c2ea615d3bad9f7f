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
