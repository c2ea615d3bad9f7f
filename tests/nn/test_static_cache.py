"""Static caches: decoding steps that a graph can replay, because their length is a tensor that the host never reads."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from alibi_attn.nn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.nn.cache import fixed

HEADS, WIDTH, TOKENS = 4, 32, 90
SLOPES = [2.0, 0.5, 1.9, 0.25]  # the first and the third head keep about as many keys


def layer_of(seed: int = 0, **options: object) -> ALiBiAttention:
    torch.manual_seed(seed)
    return ALiBiAttention(WIDTH, HEADS, **options).eval()  # type: ignore[arg-type]


def reach_cache(layer: ALiBiAttention, capacity: int) -> KVCache:
    return layer.reach_cache(score_bound=4.0, tolerance=1e-6, capacity=capacity)


def static(kind: str) -> tuple[ALiBiAttention, KVCache]:
    layer = layer_of(qk_norm=kind == "reach", slopes=SLOPES)
    return layer, KVCache(capacity=100) if kind == "all" else reach_cache(layer, 100)


@pytest.mark.parametrize("kind", ["all", "reach"])
@torch.no_grad()
def test_one_compiled_graph_serves_every_length(kind: str) -> None:
    layer, cache = static(kind)
    x = torch.randn(1, 20, WIDTH)
    layer(x[:, :1], cache=cache)
    cache.crop(0)
    torch.compiler.reset()
    counter = CompileCounter()
    step = torch.compile(lambda token: layer(token, cache=cache), backend=counter, fullgraph=True)
    outputs = [step(x[:, i : i + 1]) for i in range(20)]
    assert counter.frame_count == 1
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.long  # half a minute of compiling
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of the compiler
@pytest.mark.parametrize("cached", [False, True], ids=["block", "step"])
def test_reduce_overhead_compiles_without_a_break(cached: bool) -> None:
    block = ALiBiTransformerBlock(WIDTH, HEADS).eval()
    x, cache = torch.randn(2, 10, WIDTH), KVCache(capacity=30) if cached else None
    with torch.set_grad_enabled(not cached):
        if cache is not None:
            block(x, cache=cache)
            cache.crop(0)
        compiled = torch.compile(lambda x: block(x, cache=cache), mode="reduce-overhead", fullgraph=True)
        parts = [compiled(part) for part in (x.split(1, 1) if cached else [x])]
        torch.testing.assert_close(torch.cat(parts, 1), block(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["all", "reach"])
@torch.no_grad()
def test_outputs_beyond_the_capacity_are_nan(kind: str) -> None:
    layer = layer_of(qk_norm=kind == "reach", slopes=[2.0, 1.0, 0.5, 0.001])
    cache = KVCache(capacity=8) if kind == "all" else reach_cache(layer, 8)
    x = torch.randn(1, 10, WIDTH)
    outputs = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(10)], 1)
    assert outputs[:, :8].isfinite().all()
    assert outputs[:, 8:].isnan().all()
    cache.crop(0)
    torch.testing.assert_close(layer(x[:, :8], cache=cache), layer(x[:, :8]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_short_reach_decodes_beyond_the_capacity() -> None:
    layer = layer_of(qk_norm=True, slopes=[9.0, 8.0, 7.0, 6.0])
    cache, x = reach_cache(layer, 16), torch.randn(1, TOKENS, WIDTH)
    outputs = [layer(x[:, i : i + 1], cache=cache) for i in range(TOKENS)]
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x), atol=1e-5, rtol=1e-5)


def test_wrong_calls_say_what_to_do() -> None:
    x = torch.randn(1, 4, WIDTH)
    with pytest.raises(ValueError, match="capacity is 0 but must be at least 1"):
        KVCache(capacity=0)
    with pytest.raises(ValueError, match=r"call the layer in torch.no_grad\(\)"):
        layer_of()(x, cache=KVCache(capacity=10))
    with torch.no_grad():
        with pytest.raises(ValueError, match="4 tokens do not fit capacity=3"):
            layer_of()(x, cache=KVCache(capacity=3))
        with pytest.raises(ValueError, match="forget gates"):
            layer_of(forget_gate=True)(x, cache=KVCache(capacity=10))
        with pytest.raises(ValueError, match="supports no prefix_len, positions, sinks and windows per head"):
            layer_of(window=[5, 6, 7, 8])(x, cache=KVCache(capacity=10))
        with pytest.raises(ValueError, match="supports no prefix_len, positions, sinks and windows per head"):
            layer_of()(x, cache=KVCache(capacity=10), prefix_len=torch.tensor([2]))
        with pytest.raises(ValueError, match="needs causal=True"):
            layer_of(causal=False)(x, cache=KVCache(capacity=10))
        with pytest.raises(ValueError, match=r"key_mask has shape \[1, 4\]"):
            layer_of()(x, cache=KVCache(capacity=10), key_mask=torch.ones(1, 4, dtype=torch.bool))
        cache, layer = KVCache(capacity=10), layer_of()
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="belongs to another attention layer"):
            layer_of(1)(x, cache=cache)
        reach, layer = reach_cache(layer_of(qk_norm=True), 10), layer_of(qk_norm=True)
        with pytest.raises(ValueError, match="supports no key_mask"):
            layer(x, cache=reach, key_mask=torch.ones(1, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"crop\(0\) empties it"):
            reach.crop(2)


@torch.no_grad()
def test_a_fixed_reach_refuses_scores_and_slopes_beyond_its_bound() -> None:
    x = torch.randn(1, 40, WIDTH)
    layer = layer_of(qk_norm=True, learn_slopes=True, slopes=[2.0, 1.0, 0.5, 0.25])
    cache = layer.reach_cache(capacity=100)
    layer(x, cache=cache)
    layer.slopes.values[0] /= 2
    with pytest.raises(ValueError, match="create a new one after slopes fall"):
        layer(x[:, :1], cache=cache)
    layer.slopes.values[0] *= 2
    layer.k_norm.weight.mul_(3.0)
    with pytest.raises(ValueError, match=r"scores may reach .* a new one after the weights change"):
        layer(x[:, :1], cache=cache)
    layer.k_norm.weight.div_(3.0)
    assert len(cache) == 40, "a refused pass leaves the cache as it was"
    torch.testing.assert_close(
        layer(x[:, :1], cache=cache), layer(torch.cat([x, x[:, :1]], 1))[:, 40:], atol=1e-5, rtol=1e-5
    )
    plain = layer_of(slopes=[2.0, 1.0, 0.5, 0.25])
    with pytest.raises(ValueError, match="create it with a larger score_bound"):
        plain(x, cache=plain.reach_cache(score_bound=1e-3, capacity=100))


@torch.no_grad()
def test_a_crop_outside_the_tokens_is_refused() -> None:
    layer, cache, x = layer_of(), KVCache(capacity=50), torch.randn(1, 12, WIDTH)
    layer(x[:, :10], cache=cache)
    for length in (30, -1, torch.tensor(11)):
        with pytest.raises(ValueError, match=r"length is .* but the cache holds 10 positions"):
            cache.crop(length)
    torch.testing.assert_close(layer(x[:, 10:], cache=cache), layer(x)[:, 10:])


@torch.no_grad()
def test_a_crop_clears_the_norms_of_keys_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would read their tiles."""
    monkeypatch.setattr(fixed, "skips_on_device", lambda key: True)
    cache = KVCache(capacity=200)
    cache.append(*torch.randn(2, 1, HEADS, 150, 8))
    cache.crop(70)
    norms = cache.fixed.norms
    assert all((x > 0).flatten(0, -2).all(0).tolist() == [True, True, False, False] for x in (norms.keys, norms.values))


@pytest.mark.parametrize("kind", ["all", "reach"])
@torch.no_grad()
def test_another_batch_size_is_refused_by_name(kind: str) -> None:
    layer, cache = static(kind)
    layer(torch.randn(2, 4, WIDTH), cache=cache)
    with pytest.raises(ValueError, match=r"key is \[3, .* but the cache holds \[2, .* a new batch needs a new KVCache"):
        layer(torch.randn(3, 1, WIDTH), cache=cache)
