"""Tests use few threads, so that files can run in parallel."""

import pytest
import torch

from alibi_attn.attention.backends.native import build


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Skips tests of the C++ kernels on machines without a compiler, where `banded` runs instead."""
    if "native" in request.node.nodeid:
        reason = build.why_not()
        if reason is not None:
            pytest.skip(f"native cannot run here: {reason}")
