"""A cache that drops keys by content: equal to the full pass for any gates, always within the bound."""

import math

import pytest
import torch

from alibi_attn import ALiBiAttention, KVCache
from alibi_attn.nn import by_gates


def layer(gate_bias: float = 3.0, **options: object) -> ALiBiAttention:
    torch.manual_seed(5)
    made = ALiBiAttention(32, 4, qk_norm=True, forget_gate=True, **{"slopes": [0.0] * 4} | options)
    torch.nn.init.normal_(made.gate_proj.weight, std=0.3)
    torch.nn.init.constant_(made.gate_proj.bias, gate_bias)
    return made


@pytest.mark.parametrize(
    ("chunk", "options"),
    [
        (1, {"num_kv_heads": 2}),
        *((chunk, x) for chunk in (7, 100) for x in ({}, {"num_kv_heads": 2}, {"slopes": None}, {"gate_bias": 0.0})),
    ],
)
@torch.no_grad()
def test_it_streams_as_one_pass(chunk: int, options: dict) -> None:
    attention, x = layer(**options), torch.randn(2, 700, 32)
    cache = attention.reach_cache(tolerance=1e-6)
    parts = [attention(part, cache=cache) for part in x.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), attention(x), rtol=0, atol=2e-5)
    assert len(cache) == 700
    assert all(kept + gone == 700 for kept, gone in zip(cache.kept, cache.forgotten, strict=True))
    assert max(cache.kept) < 650
    assert cache.nbytes < 4 * 2 * 2 * 700 * 32 * 4


@torch.no_grad()
def test_dropped_keys_weigh_less_than_the_bound() -> None:
    """The mass of dropped keys for every later query, in fp64, with gates that close and open."""
    heads, dim, bound, tolerance = 2, 4, 1.0, 1e-2
    rng = torch.Generator().manual_seed(0)
    cache = KVCache(retention=by_gates([0.0, 0.01], score_bound=bound, tolerance=tolerance, num_kv_heads=1))
    keys = torch.nn.functional.normalize(torch.randn(1, 1, 3000, dim, generator=rng), dim=-1)
    queries = torch.nn.functional.normalize(torch.randn(1, heads, 3000, dim, generator=rng), dim=-1)
    gates = -torch.rand(1, heads, 3000, generator=rng).pow(8) * 0.6
    gates[..., 1000:1400] = 0.0  # no key is dropped here
    kept = gates.double().cumsum(-1)
    worst, most = 0.0, 0
    for t in range(3000):
        cache.append(keys[:, :, t : t + 1], keys[:, :, t : t + 1], gates[..., t : t + 1])
        held = cache.kept[0]
        lost = t + 1 - held
        most = max(most, held)
        if not lost:
            continue
        for h, m in enumerate((0.0, 0.01)):
            scores = keys[0, 0, : t + 1].double() @ queries[0, h, t].double()
            scores += kept[0, h, t] - kept[0, h, : t + 1] - m * torch.arange(t, -1, -1)
            worst = max(worst, float(scores.softmax(0)[:lost].sum()))
    assert 0 < worst <= tolerance
    assert most < 2000


@torch.no_grad()
def test_open_gates_forget_nothing() -> None:
    cache = KVCache(retention=by_gates([0.0], score_bound=1.0, tolerance=0.5, num_kv_heads=1))
    for _ in range(5):
        cache.append(torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64))
    assert (cache.kept, cache.forgotten) == ((320,), (0,))
    never = KVCache(retention=by_gates([5.0], score_bound=1.0, tolerance=0.0, num_kv_heads=1))
    for _ in range(5):
        never.append(torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4), torch.full((1, 1, 64), -9.0))
    assert never.kept == (320,)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="would gain weight over time"):
        by_gates([0.1, -0.1], score_bound=1.0, tolerance=1e-6, num_kv_heads=2)
    with pytest.raises(ValueError, match="must divide"):
        by_gates([0.1, 0.1], score_bound=1.0, tolerance=1e-6, num_kv_heads=3)
    cache = KVCache(retention=by_gates([0.1, 0.1], score_bound=1.0, tolerance=1e-6, num_kv_heads=2))
    with pytest.raises(ValueError, match=r"log_fgate has shape \[1, 1, 3\] but must be \[B, H, T\] = \[1, 2, 3\]"):
        cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 3))
    plain = ALiBiAttention(32, 4, qk_norm=True)
    with pytest.raises(ValueError, match="the layer has no gates and the cache forgets by gates"):
        plain(torch.randn(1, 3, 32), cache=layer().reach_cache())
    with pytest.raises(ValueError, match="the layer has forget gates and the cache forgets without them"):
        layer()(torch.randn(1, 3, 32), cache=plain.reach_cache())
    with pytest.raises(ValueError, match="with forget gates needs KVCache"):
        layer()(torch.randn(1, 3, 32), cache=KVCache(max_tokens=8))
    with pytest.raises(ValueError, match="without qk_norm=True"):
        ALiBiAttention(32, 4, forget_gate=True).reach_cache()
    attention = layer()
    cache = attention.reach_cache(score_bound=1e-3)
    with pytest.raises(ValueError, match="scores may reach"):
        attention(torch.randn(1, 3, 32), cache=cache)
    assert math.isfinite(attention.reach_cache().retention.score_bound)
