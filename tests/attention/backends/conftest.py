"""One process with Triton's interpreter, shared by all files that need it, because starting it takes seconds."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import fused_in_interpreter
import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with fused_in_interpreter.interpreter() as executor:
        yield executor
