"""The cache of a model in memory, files, a fixed capacity, with gates: any sequence of steps equals transformers."""

import model_cache_sequences
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cache_sequences import ACTIONS, KINDS, check

from alibi_attn.hf import ALiBiCache

STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), min_size=1, max_size=10)


@pytest.mark.parametrize("kind", KINDS)
@given(steps=STEPS, near=st.booleans())
@settings(max_examples=8, deadline=None)
def test_any_sequence_equals_transformers(kind, steps, near):
    check(kind, steps, near=near)


REFUSED = {
    "memory": set(),
    "file": {"reorder"},
    "capacity": {"reorder", "repeat", "select", "save"},
    "gates": {"save"},
    "gates, forget": {"crop", "save", "interrupt"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_refuses_what_the_table_says(kind):
    """After a copy of it, which is in memory, a cache in files reorders."""
    first = [("append", 154), ("append", 2), ("crop", 3), ("reorder", 1), ("copy", 0), ("edit", 3), ("pickle", 0)]
    then = [("replay", 0), ("select", 1), ("repeat", 0), ("interrupt", 2), ("append", 0), ("save", 1), ("reset", 0)]
    done = check(kind, [*first, *then, ("append", 7), ("append", 3), ("save", 1)], near=True)
    assert {action for action, times in done.items() if not times} == REFUSED[kind]


@pytest.mark.parametrize("kind", ["memory", "capacity", "gates, forget"])
def test_the_comparison_fails(kind, monkeypatch):
    append = ALiBiCache.append

    def shifted(*given, **options):
        return [kept._replace(value=kept.value + 1e-2) for kept in append(*given, **options)]

    monkeypatch.setattr(ALiBiCache, "append", shifted)
    with pytest.raises(AssertionError):
        check(kind, [("append", 14), ("append", 2)], near=False)


def test_the_truth_is_one_pass_of_the_model():
    model, plain = model_cache_sequences.models("memory")
    truth, ids = model_cache_sequences.Truth(model, plain), torch.randint(50, (2, 30))
    with torch.no_grad():
        found = torch.cat([truth.append(part, torch.ones_like(part)) for part in ids.split(10, 1)], 1)
        torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=5e-5)
