"""Threads are few in tests, so that files run side by side."""

import pytest
import torch

from alibi_attn.attention.backends.native import build


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """The C++ kernels need a compiler, which not every machine has; there `banded` takes their place."""
    if "native" in request.node.nodeid:
        reason = build.why_not()
        if reason is not None:
            pytest.skip(f"native cannot run here: {reason}")
