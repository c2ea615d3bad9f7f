"""Cached decoding equals the full pass for any split; the cache crops, reorders, grows and supports autograd."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused
from torch import Tensor

from alibi_attn import ALiBiAttention, KVCache

WAYS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query, bias": {"num_kv_heads": 1, "bias": True},
    "window": {"window": 3},
    "qk_norm": {"qk_norm": True, "num_kv_heads": 3},
    "learned": {"learn_slopes": True, "slopes": [0.0, 0.1, -0.1, 1.0, 0.5, 2.0]},
}


def attention_layer(way: str = "plain", **options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(24, 6, **{**WAYS[way], **options}).eval()


def in_chunks(layer: torch.nn.Module, x: Tensor, cuts: list[int], masks: dict[str, Tensor]) -> Tensor:
    """The sequence in chunks of the given lengths; a mask covers what has been seen so far."""
    cache, outputs = KVCache(), []
    for chunk in x.split(cuts, dim=1):
        seen = len(cache) + chunk.shape[1]
        outputs.append(layer(chunk, cache=cache, **{name: mask[:, :seen] for name, mask in masks.items()}))
        assert len(cache) == seen
    return torch.cat(outputs, dim=1)


@given(
    way=st.sampled_from(list(WAYS)),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    with_mask=st.booleans(),
    with_segments=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_cached_pass_equals_full_pass_however_the_sequence_is_cut(way, cuts, with_mask, with_segments, seed):
    generator = torch.Generator().manual_seed(seed)
    length = sum(cuts)
    layer, x = attention_layer(way), torch.randn(2, length, 24, generator=generator)
    masks = {}
    if with_mask:
        masks["key_mask"] = torch.rand(2, length, generator=generator) < 0.7
    if with_segments:
        masks["segment_ids"] = torch.randint(0, 2, (2, length), generator=generator).cumsum(1)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(layer, x, cuts, masks), layer(x, **masks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["plain", "grouped", "window", "qk_norm"])
def test_a_padded_batch_decodes_from_the_keys_within_reach(way, near):
    """Rows of very different lengths, one of which ends before the rest; a few tokens at a time, or one."""
    runs = [(0, 400), (37, 400), (300, 400), (395, 400), (10, 391)]
    layer, x = attention_layer(way), torch.randn(5, 400, 24)
    mask = torch.stack([(torch.arange(400) >= start) & (torch.arange(400) < stop) for start, stop in runs])
    cuts = [370, 1, 16, 5, 1, 7]
    with torch.no_grad():
        cached = in_chunks(layer, x, cuts, {"key_mask": mask})
        torch.testing.assert_close(cached, layer(x, key_mask=mask), rtol=1e-5, atol=1e-6)
        for b, (start, stop) in enumerate(runs):
            alone = layer(x[b : b + 1, start:stop])[0]
            torch.testing.assert_close(cached[b, start:stop], alone, rtol=1e-5, atol=1e-6)
    assert len(near) == len(cuts) - 1
    assert near[-1]["visible"] == runs
    with torch.no_grad():
        in_chunks(layer, x, cuts, {"key_mask": mask & (torch.arange(400) != 350)})
    assert len(near) == len(cuts) - 1, "under a mask with holes all keys are scored"


def test_decoding_runs_beyond_any_length_and_copies_rarely():
    cache, addresses = KVCache(), set()
    with torch.no_grad():
        for step in range(1000):
            token = torch.full((1, 2, 1, 4), float(step))
            [kept] = cache.append(token, token)
            addresses.add((kept.key.data_ptr(), kept.value.data_ptr()))
    assert len(addresses) <= 11  # the first append, then room for 4, 10, 22, ... keys
    assert cache.key[0, 0, :, 0].tolist() == cache.value[0, 1, :, 3].tolist() == list(range(1000))


def test_appending_never_writes_into_its_inputs_or_earlier_outputs():
    cache, first = KVCache(), torch.zeros(1, 1, 2, 4)
    with torch.no_grad():
        cache.append(first, first)
        earlier = cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))[0].key
        before = earlier.clone()
        for _ in range(20):
            cache.append(torch.full((1, 1, 1, 4), 2.0), torch.full((1, 1, 1, 4), 2.0))
    assert torch.equal(earlier, before)
    assert torch.equal(first, torch.zeros(1, 1, 2, 4))


def test_a_pickle_holds_no_spare_capacity_and_no_layer():
    layer, cache = attention_layer(), KVCache()
    with torch.no_grad():
        for token in torch.randn(1, 100, 24).split(1, dim=1):
            layer(token, cache=cache)
        cache.crop(40)
    assert len(pickle.dumps(cache)) < 2 * 40 * 24 * 4 + 2000 < cache.nbytes


def test_a_fork_in_the_middle_of_a_graph_has_gradients():
    layer, x = attention_layer(), torch.randn(1, 6, 24, requires_grad=True)
    cache = KVCache()
    layer(x[:, :4], cache=cache)
    fork = copy.deepcopy(cache)
    expected, actual = (
        torch.autograd.grad(layer(x[:, 4:], cache=one).sum(), x, retain_graph=True)[0] for one in (cache, fork)
    )
    assert bool((expected[:, :4] != 0).any())
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 1, 3]])
def test_gradients_through_the_cache_are_those_of_the_full_pass(cuts):
    layer = attention_layer("learned", num_kv_heads=3)
    x = torch.randn(2, 7, 24, requires_grad=True)
    weight = torch.randn(2, 7, 24)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad((layer(x) * weight).sum(), inputs)
    actual = torch.autograd.grad((in_chunks(layer, x, cuts, {}) * weight).sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [torch.no_grad, torch.inference_mode])
def test_gradients_after_a_frozen_prefix_and_frozen_steps_after_gradients(frozen):
    layer, x = attention_layer(), torch.randn(1, 8, 24)
    expected = layer(x)
    cache = KVCache()
    with frozen():
        layer(x[:, :2].clone(), cache=cache)
        layer(x[:, 2:3].clone(), cache=cache)
    trained = layer(x[:, 3:5], cache=cache)
    length = len(cache)
    with frozen():
        layer(torch.randn(1, 1, 24), cache=cache)  # a draft, cropped again below
        cache.crop(length)
        layer(x[:, 5:6].clone(), cache=cache)
    with torch.no_grad():
        last = layer(x[:, 6:], cache=cache)
    torch.testing.assert_close(trained, expected[:, 3:5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, expected[:, 6:], rtol=1e-5, atol=1e-6)
    trained.sum().backward()  # no tensor that autograd saved was modified
    assert layer.q_proj.weight.grad is not None


def test_under_autocast_the_cache_holds_one_dtype():
    layer, x = attention_layer("qk_norm"), torch.randn(2, 6, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = KVCache()
        steps = torch.cat([layer(token, cache=cache) for token in x.split(2, dim=1)], dim=1)
        assert cache.key.dtype == cache.value.dtype == torch.bfloat16
        torch.testing.assert_close(steps, layer(x), rtol=0.05, atol=0.05)


def test_wrong_use_raises_errors_that_say_what_is_allowed():
    cache, stream, token = KVCache(), KVCache(max_tokens=5), torch.zeros(2, 3, 4, 8)
    assert_refused(
        ("the cache is empty", lambda: cache.key),
        ("the cache is empty", lambda: cache.value),
        ("empty and has no batch", lambda: cache.reorder([0])),
        (r"must be \[B, K, T, D\]", lambda: cache.append(token[0], token[0], layer=attention_layer())),
        (r"must be \[B, K, T, D\]", lambda: cache.append(token, token[0])),
    )
    cache.append(token, token, layer=attention_layer())  # a refused call does not bind the cache to its layer
    stream.append(token, token)
    for wrong in (torch.zeros(1, 3, 1, 8), torch.zeros(2, 3, 1, 9), torch.zeros(2, 3, 1, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"but the cache holds \[2, 3, 4, 8\]"):
            cache.append(wrong, wrong)
    assert_refused(
        ("length is 5 but the cache holds 4", lambda: cache.crop(5)),
        ("length is -1", lambda: cache.crop(-1)),
        (r"must be \[B\]", lambda: cache.reorder([[0]])),
        ("rows 0 … 1", lambda: cache.reorder([0, 2])),
        ("forget gates, max_tokens or a capacity", lambda: stream.save("never")),
    )
    with pytest.raises(TypeError, match="must be integers"):
        cache.reorder(torch.tensor([True, False]))
    assert len(cache) == 4


def test_a_prompt_is_copied_once_and_the_next_token_copies_nothing():
    """The prompt may be a view of a larger tensor, which the cache must not keep alive; later tokens do not copy it."""
    both = torch.randn(2, 1, 3, 40, 8)
    cache = KVCache()
    with torch.no_grad():
        key = cache.append(*both)[0].key
        assert key.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
        longer = cache.append(*torch.randn(2, 1, 3, 1, 8))[0].key
    assert longer.data_ptr() == key.data_ptr()
    assert torch.equal(longer[:, :, :40], both[0])
