"""Layers with windows per head, sinks, prefixes and positions: the definition, and caches that give one full pass."""

import pytest
import space_oracle
import torch
from layer_oracle import by_formula, heads_of, output_of
from refusals import assert_refused

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_attn.nn import within_reach

WINDOWS = [4, 9, 60, 9]


def layer_of(**options) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(32, 4, **{"num_kv_heads": 2, "slopes": [0.5, 0.3, 0.2, 0.1], **options})


def stamps(n: int) -> torch.Tensor:
    return torch.rand(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(1)


every_layer = pytest.mark.parametrize(
    "options", [{"window": WINDOWS}, {"window": 9, "sinks": 3}, {"window": WINDOWS, "sinks": 3}, {}]
)


@every_layer
@pytest.mark.parametrize("call", [{}, {"prefix_len": torch.tensor([10, 31])}, {"positions": stamps(50)}])
def test_a_layer_passes_them_on(options: dict, call: dict) -> None:
    layer, x = layer_of(**options), torch.randn(2, 50, 32)
    torch.testing.assert_close(layer(x, **call), by_formula(layer, x, **options, **call).float(), rtol=1e-4, atol=1e-5)
    block = ALiBiTransformerBlock(32, 4, **options)
    assert (block(x, **call) - block(x)).abs().max() > 1e-3 or not call


@every_layer
@pytest.mark.parametrize("call", [{}, {"prefix_len": torch.tensor([10, 20])}, {"positions": stamps(50)}])
def test_chunks_with_a_cache_give_the_full_pass(options: dict, call: dict) -> None:
    layer, x, cache, outputs = layer_of(**options), torch.randn(2, 50, 32), KVCache(), []
    with torch.no_grad():
        for chunk in x.split([20, 1, 9, 1, 19], dim=1):
            upto = len(cache) + chunk.shape[1]
            cut = {name: value[:, :upto] if name == "positions" else value for name, value in call.items()}
            outputs.append(layer(chunk, cache=cache, **cut))
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x, **call), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"window": 9, "sinks": 3}, {"window": WINDOWS, "sinks": 12}, {"window": WINDOWS}])
@pytest.mark.parametrize("chunks", [[1] * 70, [20, 1, 30, 1, 18], [70]])
def test_a_forgetting_cache_keeps_the_sinks(options: dict, chunks: list[int]) -> None:
    layer, x = layer_of(qk_norm=True, **options).eval(), torch.randn(2, 70, 32)
    with torch.no_grad():
        cache = layer.reach_cache()
        outputs = [layer(chunk, cache=cache) for chunk in x.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x), rtol=1e-4, atol=1e-5)
    assert len(cache) == 70
    assert max(cache.kept) <= 60  # within the window; the sinks come on top
    if len(chunks) == 70 and "sinks" in options:
        assert cache.first.length == options["sinks"]


def test_static_reach_follows_the_windows() -> None:
    layer = layer_of(qk_norm=True, window=[4, 9, 10**6, 9])
    free = layer_of(qk_norm=True).static_reach()
    assert layer.static_reach().tolist() == torch.minimum(free, torch.tensor([4, 9, 10**6, 9])).tolist()
    assert "window=(4, 9, 1000000, 9), sinks=2" in repr(layer_of(window=[4, 9, 10**6, 9], sinks=2))


def test_training_through_them_reaches_the_slopes() -> None:
    layer = layer_of(learn_slopes=True, window=WINDOWS, sinks=2)
    layer(torch.randn(2, 40, 32), positions=stamps(40), prefix_len=torch.tensor([9, 0])).square().sum().backward()
    assert bool((layer.slopes.values.grad != 0).all())


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("registers", [0, 3])
def test_a_layer_attends_by_distance_in_space(axes: int, registers: int) -> None:
    layer = layer_of(causal=False, registers=registers, learn_slopes=True).double()
    x, places = torch.randn(2, 50, 32, dtype=torch.float64), torch.rand(2, 50, axes, dtype=torch.float64) * 9
    places = places.sort(1).values if axes == 1 else places
    slopes = layer.slopes.values.double()
    parts = (heads_of(layer, name, x) for name in "qkv")
    mixed, _ = space_oracle.definition(*parts, slopes, places, places, registers=registers)
    expected = output_of(layer, mixed)
    found = layer(x, positions=places if axes > 1 else places[..., 0])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    own, truth_of = (torch.autograd.grad(y.square().sum(), layer.slopes.values)[0] for y in (found, expected))
    torch.testing.assert_close(own, truth_of, rtol=1e-5, atol=1e-6)
    block = ALiBiTransformerBlock(32, 4, causal=False, registers=registers).double()
    assert (block(x, positions=places if axes > 1 else places[..., 0]) - block(x)).abs().max() > 1e-3
    assert ("registers=3" in repr(layer)) == (registers == 3)


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({}, {"positions": torch.zeros(2, 5, 2)}, "have no left and right: pass causal=False"),
        ({"causal": False}, {"positions": torch.zeros(2, 4, 2)}, r"must be \[B, S, 2 or 3\] = \[2, 5, 2 or 3\]"),
        ({"causal": False, "window": 3}, {"positions": torch.zeros(2, 5, 2)}, "exclude window"),
        ({"registers": 2}, {}, "registers are symmetric"),
        ({"causal": False, "registers": -1}, {}, "registers is -1 but must be"),
        ({"kv_dim": 32, "causal": False, "registers": 2}, {}, "no registers and no gates"),
    ],
)
def test_what_has_no_place_in_space_is_refused(options: dict, given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layer_of(**options)(torch.randn(2, 5, 32), **given)


def test_what_does_not_fit_is_refused_before_the_cache_grows() -> None:
    x, cache, layer = torch.randn(2, 5, 32), KVCache(), layer_of()
    stream, two, of_window = KVCache(max_tokens=8), torch.tensor([1, 2]), layer_of(window=9, sinks=6)
    near = KVCache(retention=within_reach([9] * 4, score_bound=1e9, tolerance=0.0, num_kv_heads=2))
    memory, no_window = torch.randn(2, 3, 6), "one window for all heads and no sinks"
    with torch.no_grad():
        layer(x, cache=cache)
        assert_refused(
            ("prefix_len is 6 .* 0 to 5, the cached tokens", lambda: layer(x, cache=cache, prefix_len=two * 3)),
            (r"must be \[B\] = \[2\]", lambda: layer(x, cache=cache, prefix_len=two[:1])),
            (r" \[2, 5\] .* 5 cached keys and the 5 new", lambda: layer(x, cache=cache, positions=stamps(5))),
            ("must not decrease", lambda: layer(x, cache=cache, positions=-stamps(10))),
            ("forget gates supports no prefix_len", lambda: layer_of(forget_gate=True)(x, prefix_len=two)),
            ("prefix_len is for causal attention", lambda: layer_of(causal=False)(x, prefix_len=two)),
            (r"forgets supports no .*positions", lambda: layer(x, cache=stream, positions=stamps(5))),
            ("has 6 sinks but this cache keeps 4", lambda: of_window(x, cache=stream)),
            ("has 6 sinks but this cache keeps 0", lambda: of_window(x, cache=near)),
            ("cross-attention supports no .*prefix_len", lambda: layer_of(kv_dim=6)(x, memory=memory, prefix_len=two)),
            (no_window, lambda: layer_of(forget_gate=True, window=WINDOWS)),
            (no_window, lambda: layer_of(forget_gate=True, window=4, sinks=1)),
            (r"\[H\] = 4 integers", lambda: layer_of(window=[4, 9])),
            ("no window", lambda: layer_of(kv_dim=6, window=WINDOWS)),
            ("sinks is -1", lambda: layer_of(sinks=-1)),
        )
    assert len(cache) == 5
