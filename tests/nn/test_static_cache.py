"""Static caches: decoding steps that a graph can replay, because their length is a tensor that the host never reads."""

import pytest
import torch
from refusals import assert_refused
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from alibi_attn.nn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.nn.cache import fixed

pytestmark = pytest.mark.usefixtures("no_gradients")
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
@torch.enable_grad()
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
def test_outputs_beyond_the_capacity_are_nan(kind: str) -> None:
    layer = layer_of(qk_norm=kind == "reach", slopes=[2.0, 1.0, 0.5, 0.001])
    cache = KVCache(capacity=8) if kind == "all" else reach_cache(layer, 8)
    x = torch.randn(1, 10, WIDTH)
    outputs = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(10)], 1)
    assert outputs[:, :8].isfinite().all()
    assert outputs[:, 8:].isnan().all()
    cache.crop(0)
    torch.testing.assert_close(layer(x[:, :8], cache=cache), layer(x[:, :8]), atol=1e-5, rtol=1e-5)


def test_short_reach_decodes_beyond_the_capacity() -> None:
    layer = layer_of(qk_norm=True, slopes=[9.0, 8.0, 7.0, 6.0])
    cache, x = reach_cache(layer, 16), torch.randn(1, TOKENS, WIDTH)
    outputs = [layer(x[:, i : i + 1], cache=cache) for i in range(TOKENS)]
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x), atol=1e-5, rtol=1e-5)


@torch.enable_grad()
def test_wrong_calls_say_what_to_do() -> None:
    x, mask = torch.randn(1, 4, WIDTH), torch.ones(1, 4).bool()
    held, plain, normed = KVCache(capacity=10), layer_of(), layer_of(qk_norm=True)
    reach, no_parts = reach_cache(normed, 10), "supports no prefix_len, positions, sinks and windows per head"
    outside = "length is .* but the cache holds 4 positions"
    another = r"key is \[3, .* but the cache holds \[1, .* a new batch needs a new KVCache"

    def call(capacity: int = 10, given: dict[str, Tensor] | None = None, **options: object) -> Tensor:
        return layer_of(**options)(x, cache=KVCache(capacity=capacity), **given or {})

    assert_refused((r"call the layer in torch.no_grad\(\)", call))
    with torch.no_grad():
        plain(x, cache=held)
        assert_refused(
            ("capacity is 0 but must be at least 1", lambda: call(0)),
            ("4 tokens do not fit capacity=3", lambda: call(3)),
            ("forget gates", lambda: call(forget_gate=True)),
            (no_parts, lambda: call(window=[5, 6, 7, 8])),
            (no_parts, lambda: call(given={"prefix_len": torch.tensor([2])})),
            ("needs causal=True", lambda: call(causal=False)),
            (r"key_mask has shape \[1, 4\]", lambda: call(given={"key_mask": mask})),
            ("belongs to another attention layer", lambda: layer_of(1)(x, cache=held)),
            ("supports no key_mask", lambda: normed(x, cache=reach, key_mask=mask)),
            (r"crop\(0\) empties it", lambda: reach.crop(2)),
            ("a cache of a fixed capacity has no beams", lambda: held.reorder([0])),
            *((outside, lambda length=length: held.crop(length)) for length in (30, -1, torch.tensor(11))),
        )
        normed(x, cache=reach)
        for layer, cache in ((plain, held), (normed, reach)):
            with pytest.raises(ValueError, match=another):
                layer(x.expand(3, -1, -1), cache=cache)
        torch.testing.assert_close(plain(x, cache=held), plain(torch.cat([x, x], 1))[:, 4:])


def test_a_fixed_reach_refuses_scores_and_slopes_beyond_its_bound() -> None:
    x = torch.randn(1, 40, WIDTH)
    layer = layer_of(qk_norm=True, learn_slopes=True, slopes=[2.0, 1.0, 0.5, 0.25])
    cache = layer.reach_cache(capacity=100)
    layer(x, cache=cache)
    for weight, factor, message in (
        (layer.slopes.values, 0.5, "create a new one after slopes fall"),
        (layer.k_norm.weight, 3.0, "scores may reach .* a new one after the weights change"),
    ):
        weight.mul_(factor)
        assert_refused((message, lambda: layer(x[:, :1], cache=cache)))
        weight.div_(factor)
    assert len(cache) == 40, "a refused pass leaves the cache as it was"
    torch.testing.assert_close(
        layer(x[:, :1], cache=cache), layer(torch.cat([x, x[:, :1]], 1))[:, 40:], atol=1e-5, rtol=1e-5
    )
    plain = layer_of(slopes=[2.0, 1.0, 0.5, 0.25])
    low = plain.reach_cache(score_bound=1e-3, capacity=100)
    assert_refused(("create it with a larger score_bound", lambda: plain(x, cache=low)))


def test_a_crop_clears_the_norms_of_keys_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would read their tiles."""
    monkeypatch.setattr(fixed, "skips_on_device", lambda key: True)
    cache = KVCache(capacity=200)
    cache.append(*torch.randn(2, 1, HEADS, 150, 8))
    cache.crop(70)
    norms = cache.fixed.norms
    assert all((x > 0).flatten(0, -2).all(0).tolist() == [True, True, False, False] for x in (norms.keys, norms.values))
