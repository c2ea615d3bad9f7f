"""Every storage × retention: any sequence of appends, crops, reorders, copies, files, edits and replays equals one pass."""

import cache_sequences
import pytest
import torch
from cache_sequences import ACTIONS, KINDS, check
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_attn import KVCache

STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(steps=STEPS, near=st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_sequence_equals_one_pass(kind, steps, near):
    check(kind, steps, near=near)


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_forget_and_agree(kind):
    """So much that heads within reach, and gates, have forgotten."""
    steps = [
        ("append", 154),
        ("append", 21),
        *[("append", 0)] * 5,
        ("copy", 0),
        ("crop", 1),
        ("append", 4),
        ("pickle", 0),
    ]
    done = check(kind, steps, near=True)
    assert done["append"] >= 8


WRONG = {
    "a key is lost": lambda kept: kept._replace(key=kept.key.roll(1, 2)),
    "the window is off by one": lambda kept: kept._replace(window=5),
    "queries are one place off": lambda kept: kept._replace(first=kept.first + 1),
    "a value is off": lambda kept: kept._replace(value=kept.value + 1e-3),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["memory", "reach", "capacity"])
def test_the_comparison_fails(kind, wrong, monkeypatch):
    append = KVCache.append
    monkeypatch.setattr(KVCache, "append", lambda *x, **y: [WRONG[wrong](kept) for kept in append(*x, **y)])
    with pytest.raises(AssertionError):
        check(kind, [("append", 21), ("append", 2)], near=False)


def test_a_refused_step_that_changes_the_cache_is_noticed(monkeypatch):
    crop = KVCache.crop

    def cropped_and_refused(cache, length):
        crop(cache, length)
        raise ValueError("refused")

    monkeypatch.setattr(KVCache, "crop", cropped_and_refused)
    with pytest.raises(AssertionError, match="a refused crop has changed the cache"):
        check("memory", [("append", 4), ("crop", 2)], near=False)


def test_the_truth_is_what_a_layer_computes_in_one_pass():
    torch.manual_seed(0)
    layer = cache_sequences.ALiBiAttention(64, 4, num_kv_heads=2, qk_norm=True, forget_gate=True)
    x = torch.randn(2, 50, 64)
    with torch.no_grad():
        torch.testing.assert_close(cache_sequences.Truth(layer).append(x, None), layer(x), rtol=0, atol=1e-5)
