"""Caches that drop keys: a window of the last tokens after a few sinks, and a certified reach per head."""

import math

import pytest
import torch
from torch import Tensor

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.nn import within_reach


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def layer_with(**options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(32, 4, **{"qk_norm": True, "slopes": [2.0, 1.0, 0.5, 0.05], **options}).eval()


def decoded(layer: torch.nn.Module, x: Tensor, cache: KVCache, cuts: list[int]) -> Tensor:
    return torch.cat([layer(chunk, cache=cache) for chunk in x.split(cuts, dim=1)], dim=1)


def test_a_stream_stays_small_and_is_whole_until_it_is_full():
    layer, x = layer_with(), torch.randn(1, 200, 32)
    cache, sizes = KVCache(max_tokens=20), []
    start = decoded(layer, x[:, :20], cache, [7, 7, 6])
    torch.testing.assert_close(start, layer(x[:, :20]), rtol=1e-4, atol=1e-6)
    for token in x[:, 20:].split(1, dim=1):
        layer(token, cache=cache)
        sizes.append(cache.nbytes)
    assert set(sizes) == {2 * 20 * 32 * 4}


@pytest.mark.parametrize("cuts", [[1] * 400, [400], [150, 1, 1, 98, 150]])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"window": 9}])
def test_decoding_within_reach_is_the_full_pass(cuts, options):
    """To rounding: the default tolerance is far below it."""
    layer, x = layer_with(**options), torch.randn(2, 400, 32)
    cache = layer.reach_cache()
    torch.testing.assert_close(decoded(layer, x, cache, cuts), layer(x), rtol=1e-4, atol=2e-6)
    assert len(cache) == 400
    assert all(kept + forgot == 400 for kept, forgot in zip(cache.kept, cache.forgotten, strict=True))
    reach = layer.static_reach().reshape(layer.num_kv_heads, -1).amax(1)
    assert cache.kept == tuple(min(int(r) - 1, 400) for r in reach)
    assert min(cache.kept) < 80 or layer.num_kv_heads == 1  # a shared key head serves its widest query head


def test_the_comparison_fails_for_a_reach_that_is_too_short():
    layer, x = layer_with(slopes=[0.05] * 4), torch.randn(1, 300, 32)
    cache = KVCache(retention=within_reach([8] * 4, score_bound=layer.score_bound(), tolerance=0.5))
    assert (decoded(layer, x, cache, [1] * 300) - layer(x)).abs().max() > 1e-2


def test_a_large_tolerance_drops_more_keys_within_its_bound():
    layer, x, tolerance = layer_with(), torch.randn(1, 300, 32), 0.01
    cache = layer.reach_cache(tolerance=tolerance)
    error = (decoded(layer, x, cache, [1] * 300) - layer(x)).norm(dim=-1).max()
    values = layer.v_proj(x).unflatten(-1, (4, 8)).norm(dim=-1).max()
    assert error <= 2 * tolerance * values * 2 * torch.linalg.matrix_norm(layer.out_proj.weight, ord=2) + 1e-6
    assert all(a < b for a, b in zip(cache.kept[:3], layer.static_reach().tolist()[:3], strict=True))
    assert "forgot [2" in repr(cache)
    assert "at most 1.0e-02 of any query's softmax mass is forgotten" in repr(cache)


@pytest.mark.parametrize("chunk", [1, 64])
def test_memory_and_what_is_read_stay_flat_over_a_long_stream(chunk):
    torch.manual_seed(0)
    block = ALiBiTransformerBlock(32, 4, qk_norm=True, slopes=[2.0, 1.0, 0.5, 0.3]).eval()
    length = 1500 if chunk == 1 else 10_000
    x, cache, sizes, outputs = torch.randn(1, length, 32), block.attention.reach_cache(), [], []
    for part in x.split(chunk, dim=1):
        outputs.append(block(part, cache=cache))
        sizes.append(cache.nbytes)
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])
    assert max(sizes) < 4 * 2 * 32 * 4 * (chunk + max(cache.kept))
    last = slice(length - 700, length)  # far more than the widest reach
    torch.testing.assert_close(torch.cat(outputs, dim=1)[:, last], block(x[:, -1500:])[:, -700:], rtol=1e-4, atol=5e-6)


def test_heads_without_a_reach_keep_everything():
    layer, x = layer_with(slopes=[1.0, 0.0, -0.1, 0.5]), torch.randn(1, 90, 32)
    cache = layer.reach_cache()
    torch.testing.assert_close(decoded(layer, x, cache, [30] * 3), layer(x), rtol=1e-4, atol=1e-6)
    assert cache.forgotten[1:3] == (0, 0)
    assert cache.forgotten[0] > 0


def test_a_given_bound_serves_a_layer_without_norms_and_is_enforced():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(32, 4, slopes=[2.0, 1.0, 0.5, 0.3]).eval(), torch.randn(1, 200, 32)
    heads = [getattr(layer, f"{name}_proj")(x).unflatten(-1, (4, 8)).norm(dim=-1).max() for name in "qk"]
    bound = float(heads[0] * heads[1]) / math.sqrt(8)
    cache = layer.reach_cache(score_bound=bound * 1.001)
    torch.testing.assert_close(decoded(layer, x, cache, [1] * 200), layer(x), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"scores may reach .* but this cache forgot keys for scores up to"):
        decoded(layer, x, layer.reach_cache(score_bound=bound * 0.99), [1] * 200)
    for size in (1e3, math.nan):
        with pytest.raises(ValueError, match="scores may reach"):
            layer(x[:, :1] * size, cache=cache)
    layer(x[:, :1], cache=cache)  # a refused pass leaves the cache as it was
    assert len(cache) == 201
    with pytest.raises(ValueError, match="create the layer with qk_norm=True"):
        layer.reach_cache()
    normed = layer_with()
    cache = normed.reach_cache()
    normed.q_norm.weight.mul_(3.0)
    with pytest.raises(ValueError, match="a new one after the weights change"):
        normed(x, cache=cache)


def test_gradients_flow_through_what_is_kept():
    with torch.enable_grad():
        layer, x = layer_with(), torch.randn(1, 60, 32, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), x)
        actual = torch.autograd.grad(decoded(layer, x, layer.reach_cache(), [20] * 3).square().sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_a_head_that_keeps_no_keys_takes_back_drafts_of_several_steps():
    cache, token = KVCache(retention=within_reach([1, 100], score_bound=1.0, tolerance=0.1)), torch.zeros(1, 2, 1, 4)
    for _ in range(5):
        cache.append(token, token)
    cache.crop(2)
    assert (len(cache), cache.kept, cache.forgotten) == (2, (0, 2), (2, 0))
    cache.append(token, token)
    assert cache.kept == (0, 3)


def test_rows_are_reordered_where_a_head_keeps_no_key():
    """After a crop some groups of heads may hold nothing."""
    retention = within_reach([1, 100], score_bound=1.0, tolerance=0.1)
    cache, rows = KVCache(retention=retention), torch.arange(3.0)[:, None, None, None].expand(3, 2, 1, 4)
    cache.append(rows, rows), cache.append(rows, rows)
    cache.crop(1)
    assert cache.kept == (0, 1)
    cache.reorder([2, 0, 0])
    assert [kept.key[:, 0, -1, 0].tolist() for kept in cache.append(rows, rows)] == [[0, 1, 2], [0, 1, 2]]
    assert cache.groups[1].filled()[0][:, 0, 0, 0].tolist() == [2, 0, 0]
    with pytest.raises(ValueError, match="rows 0 … 2"):
        cache.reorder([0, 3])
    cache.crop(0)
    with pytest.raises(ValueError, match="the cache is empty and has no batch"):
        cache.reorder([0])


def test_wrong_use_raises_errors_that_say_what_is_allowed():
    for sinks, size in ((4, 4), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="sinks must be from 0 to max_tokens − 1"):
            KVCache(max_tokens=size, sinks=sinks)
    stream = KVCache(max_tokens=3, sinks=1)
    two = torch.zeros(1, 1, 2, 4)
    stream.append(two, two)
    with pytest.raises(ValueError, match="2 tokens do not fit after 2 of at most 3"):
        stream.append(two, two)
    for _ in range(3):
        stream.append(two[:, :, :1], two[:, :, :1])
    with pytest.raises(ValueError, match="has forgotten 2 tokens"):
        stream.crop(2)
    stream.crop(0)
    assert (len(stream), stream.forgotten) == (0, ())
    with pytest.raises(ValueError, match="at least 1"):
        within_reach([3, 0], score_bound=1.0, tolerance=0.1)
    with pytest.raises(ValueError, match="num_kv_heads is 2 but must divide the 3 heads"):
        within_reach([3, 3, 3], score_bound=1.0, tolerance=0.1, num_kv_heads=2)
    layer, x = layer_with(), torch.randn(1, 3, 32)
    for cache in (layer.reach_cache(), KVCache(max_tokens=5)):
        with pytest.raises(ValueError, match="a cache that forgets supports no key_mask"):
            layer(x, cache=cache, key_mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="reach_cache needs causal=True"):
        layer_with(causal=False).reach_cache()
    with pytest.raises(ValueError, match=r"must be \[B, K, T, D\] with K = 4"):
        layer.reach_cache().append(two, two)
    cache = layer.reach_cache()
    with pytest.raises(ValueError, match=r"both must be \[B, K, T, D\]"):
        cache.append(two.expand(1, 4, 2, 4), two)
    for tokens in (torch.randn(1, 300, 32), x):
        layer(tokens, cache=cache)
    with pytest.raises(ValueError, match="would need keys that it has forgotten"):
        cache.crop(20)
    with pytest.raises(ValueError, match="belongs to another attention layer"):
        layer_with()(x, cache=cache)
    with pytest.raises(ValueError, match="crop to 0 … 303"):
        cache.crop(304)
