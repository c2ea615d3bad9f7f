"""The spec of a call: built once, changed without initializing it again."""

import dataclasses

import pytest
import torch

from alibi_attn import alibi_attention
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec


def test_a_plain_call_builds_one_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the checks of a plain call run no operation of torch."""
    tensors, built, make = [torch.randn(2, 4, 130, 8, requires_grad=True) for _ in range(3)], [], AttentionSpec.__init__
    make_spec(*tensors)  # the default slopes are created once
    monkeypatch.setattr(AttentionSpec, "__init__", lambda self, **fields: built.append(make(self, **fields)))
    alibi_attention(*tensors, backend="native").sum().backward()
    assert len(built) == 1
    with torch.autograd.profiler.profile(use_kineto=False) as profiled:
        make_spec(*tensors)
    assert not [event.name for event in profiled.function_events if event.name.startswith("aten::")]


def test_a_changed_spec_equals_a_replaced_one() -> None:
    spec = make_spec(*(torch.randn(2, 4, 50, 8) for _ in range(3)), [0.5, 0.25, 0.125, 0.0625], window=9)
    changed = spec.changed(window=5, tolerance=0.0)
    assert changed == dataclasses.replace(spec, window=5, tolerance=0.0)
    assert (spec.window, changed.slopes is spec.slopes) == (9, True)
