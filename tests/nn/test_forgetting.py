"""Caches that drop keys: a window of the last tokens after a few sinks, and a certified reach per head."""

import math

import pytest
import torch
from refusals import assert_refused
from torch import Tensor

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.nn import within_reach

pytestmark = pytest.mark.usefixtures("no_gradients")


def layer_with(**options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(32, 4, **{"qk_norm": True, "slopes": [2.0, 1.0, 0.5, 0.05], **options}).eval()


def decoded(layer: torch.nn.Module, x: Tensor, cache: KVCache, cuts: list[int]) -> Tensor:
    return torch.cat([layer(chunk, cache=cache) for chunk in x.split(cuts, dim=1)], dim=1)


def test_a_stream_stays_small():
    layer, cache, sizes = layer_with(), KVCache(max_tokens=20), []
    for token in torch.randn(1, 200, 32).split(1, dim=1):
        layer(token, cache=cache)
        sizes.append(cache.nbytes)
    assert set(sizes[20:]) == {2 * 20 * 32 * 4}


@pytest.mark.parametrize("cuts", [[1] * 400, [400], [150, 1, 1, 98, 150]])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"window": 9}, {"slopes": [1.0, 0.0, -0.1, 0.5]}],
)
def test_decoding_within_reach_is_the_full_pass(cuts, options):
    """To rounding: the default tolerance is far below it. Heads without a reach keep everything."""
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


def test_a_given_bound_serves_a_layer_without_norms_and_is_enforced():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(32, 4, slopes=[2.0, 1.0, 0.5, 0.3]).eval(), torch.randn(1, 200, 32)
    heads = [getattr(layer, f"{name}_proj")(x).unflatten(-1, (4, 8)).norm(dim=-1).max() for name in "qk"]
    bound = float(heads[0] * heads[1]) / math.sqrt(8)
    cache, short = layer.reach_cache(score_bound=bound * 1.001), layer.reach_cache(score_bound=bound * 0.99)
    torch.testing.assert_close(decoded(layer, x, cache, [1] * 200), layer(x), rtol=1e-4, atol=1e-6)
    normed = layer_with()
    stale = normed.reach_cache()
    normed.q_norm.weight.mul_(3.0)
    assert_refused(
        (" reach .* but this cache forgot keys for scores up to", lambda: decoded(layer, x, short, [1] * 200)),
        ("scores may reach", lambda: layer(x[:, :1] * 1e3, cache=cache)),
        ("scores may reach", lambda: layer(x[:, :1] * math.nan, cache=cache)),
        ("create the layer with qk_norm=True", layer.reach_cache),
        ("a new one after the weights change", lambda: normed(x, cache=stale)),
    )
    layer(x[:, :1], cache=cache)  # a refused pass leaves the cache as it was
    assert len(cache) == 201


def test_gradients_flow_through_what_is_kept():
    with torch.enable_grad():
        layer, x = layer_with(), torch.randn(1, 60, 32, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), x)
        actual = torch.autograd.grad(decoded(layer, x, layer.reach_cache(), [20] * 3).square().sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_drafts_are_taken_back_and_rows_reordered_where_a_head_keeps_no_key():
    """After a crop some groups of heads may hold nothing."""
    retention = within_reach([1, 100], score_bound=1.0, tolerance=0.1)
    cache, rows = KVCache(retention=retention), torch.arange(3.0)[:, None, None, None].expand(3, 2, 1, 4)
    for _ in range(5):
        cache.append(rows, rows)
    cache.crop(2)
    assert (len(cache), cache.kept, cache.forgotten) == (2, (0, 2), (2, 0))
    cache.reorder([2, 0, 0])
    assert [kept.key[:, 0, -1, 0].tolist() for kept in cache.append(rows, rows)] == [[0, 1, 2], [0, 1, 2]]
    assert cache.groups[1].filled()[0][:, 0, 0, 0].tolist() == [2, 0, 0]
    assert_refused(("rows 0 … 2", lambda: cache.reorder([0, 3])))
    cache.crop(0)
    assert_refused(("the cache is empty and has no batch", lambda: cache.reorder([0])))


def test_wrong_use_raises_errors_that_say_what_is_allowed():
    bound, two = {"score_bound": 1.0, "tolerance": 0.1}, torch.zeros(1, 1, 2, 4)
    stream, wrong_sinks = KVCache(max_tokens=3, sinks=1), "sinks must be from 0 to max_tokens − 1"
    stream.append(two, two)
    layer, x, no_mask = layer_with(), torch.randn(1, 3, 32), "a cache that forgets supports no key_mask"
    cache, seen = layer.reach_cache(), torch.ones(1, 3, dtype=torch.bool)
    assert_refused(
        (wrong_sinks, lambda: KVCache(max_tokens=4, sinks=4)),
        (wrong_sinks, lambda: KVCache(max_tokens=3, sinks=-1)),
        (wrong_sinks, lambda: KVCache(max_tokens=0, sinks=0)),
        ("2 tokens do not fit after 2 of at most 3", lambda: stream.append(two, two)),
        ("at least 1", lambda: within_reach([3, 0], **bound)),
        ("num_kv_heads is 2 but must divide the 3 heads", lambda: within_reach([3, 3, 3], num_kv_heads=2, **bound)),
        (no_mask, lambda: layer(x, cache=cache, key_mask=seen)),
        (no_mask, lambda: layer(x, cache=KVCache(max_tokens=5), key_mask=seen)),
        ("reach_cache needs causal=True", lambda: layer_with(causal=False).reach_cache()),
        (r"must be \[B, K, T, D\] with K = 4", lambda: cache.append(two, two)),
        (r"both must be \[B, K, T, D\]", lambda: cache.append(two.expand(1, 4, 2, 4), two)),
    )
    for _ in range(3):
        stream.append(two[:, :, :1], two[:, :, :1])
    for tokens in (torch.randn(1, 300, 32), x):
        layer(tokens, cache=cache)
    assert_refused(
        ("has forgotten 2 tokens", lambda: stream.crop(2)),
        ("would need keys that it has forgotten", lambda: cache.crop(20)),
        ("belongs to another attention layer; make one", lambda: layer_with()(x, cache=cache)),
        ("crop to 0 … 303", lambda: cache.crop(304)),
    )
    stream.crop(0)
    assert (len(cache), len(stream), stream.forgotten) == (303, 0, ())
