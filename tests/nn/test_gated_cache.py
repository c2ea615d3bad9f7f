"""A cache that drops keys by content: equal to the full pass for any gates, always within the bound."""

import math

import pytest
import torch
from refusals import assert_refused

from alibi_attn import ALiBiAttention, KVCache
from alibi_attn.nn import by_gates, within_reach

pytestmark = pytest.mark.usefixtures("no_gradients")


def layer(gate_bias: float = 3.0, **options: object) -> ALiBiAttention:
    torch.manual_seed(5)
    made = ALiBiAttention(32, 4, qk_norm=True, forget_gate=True, **{"slopes": [0.0] * 4} | options)
    torch.nn.init.normal_(made.gate_proj.weight, std=0.3)
    torch.nn.init.constant_(made.gate_proj.bias, gate_bias)
    return made


@pytest.mark.parametrize(
    ("chunk", "options"),
    [(1, {"num_kv_heads": 2}), (7, {}), (7, {"slopes": None}), (100, {"gate_bias": 0.0}), (100, {"num_kv_heads": 2})],
)
def test_it_streams_as_one_pass(chunk: int, options: dict) -> None:
    attention, x = layer(**options), torch.randn(2, 450, 32)
    cache = attention.reach_cache(tolerance=1e-6)
    parts = [attention(part, cache=cache) for part in x.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), attention(x), rtol=0, atol=2e-5)
    assert len(cache) == 450
    assert all(kept + gone == 450 for kept, gone in zip(cache.kept, cache.forgotten, strict=True))
    assert max(cache.kept) < 400
    assert cache.nbytes < 4 * 2 * 2 * 450 * 32 * 4


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


def test_reordered_rows_keep_the_weight_that_they_lost() -> None:
    """What a cache may still drop depends on what each row has dropped: after reordering, it drops what it would have before."""
    torch.manual_seed(1)
    keys = torch.nn.functional.normalize(torch.randn(2, 1, 2000, 4), dim=-1)
    gates = -torch.rand(2, 1, 2000).pow(8) * torch.tensor([0.9, 0.3])[:, None, None]
    gates[:, :, 1000:] = gates[:, :, 1000:].flip(0)

    def forgotten(swapped: bool, *, reorder: bool) -> list[int]:
        cache = KVCache(retention=by_gates([0.01], score_bound=1.0, tolerance=0.3, num_kv_heads=1))
        rows, found = [1, 0] if swapped else [0, 1], []
        for t in range(2000):
            if reorder and t == 1000:
                cache.reorder([1, 0])
                rows = rows[::-1]
            cache.append(*(x[rows, :, t : t + 1] for x in (keys, keys, gates)))
            found.append(cache.forgotten[0])
        return found

    assert 0 < (wanted := forgotten(True, reorder=False))[1000] < wanted[-1]
    assert forgotten(False, reorder=True) == wanted


def test_an_emptied_cache_is_a_new_one() -> None:
    """Neither the longest key nor the dropped weight of the text before counts any more."""
    attention, x = layer(), torch.randn(1, 300, 32)
    cache, new = attention.reach_cache(tolerance=1e-3), attention.reach_cache(tolerance=1e-3)
    attention(x, cache=cache)
    cache.crop(0)
    for part in x.flip(1).split(60, 1):
        attention(part, cache=cache)
        attention(part, cache=new)
        assert cache.forgotten == new.forgotten
    assert max(new.forgotten) > 0
    slopes = torch.tensor([0.5])
    within = KVCache(retention=within_reach([8], score_bound=2.0, tolerance=1e-3, slopes=slopes.tolist()))
    for key, query in ((9.0, 0.05), (0.05, 9.0)):  # each text alone scores less than the bound
        tokens = torch.full((1, 1, 20, 4), key)
        within.append(tokens, tokens, query=torch.full((1, 1, 20, 4), query), slopes=slopes)
        within.crop(0)


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
    bound, attention, plain = {"score_bound": 1.0, "tolerance": 1e-6}, layer(), ALiBiAttention(32, 4, qk_norm=True)
    cache = KVCache(retention=by_gates([0.1, 0.1], num_kv_heads=2, **bound))
    key, x, low = torch.zeros(1, 2, 3, 4), torch.randn(1, 3, 32), attention.reach_cache(score_bound=1e-3)
    assert_refused(
        ("would gain weight over time", lambda: by_gates([0.1, -0.1], num_kv_heads=2, **bound)),
        ("must divide", lambda: by_gates([0.1, 0.1], num_kv_heads=3, **bound)),
        (r" \[1, 1, 3\] but must be \[B, H, T\] = \[1, 2, 3\]", lambda: cache.append(key, key, key[:, :1, :, 0])),
        ("has no gates and the cache forgets by gates", lambda: plain(x, cache=attention.reach_cache())),
        ("has forget gates and the cache forgets without them", lambda: attention(x, cache=plain.reach_cache())),
        ("with forget gates needs KVCache", lambda: attention(x, cache=KVCache(max_tokens=8))),
        ("without qk_norm=True", lambda: ALiBiAttention(32, 4, forget_gate=True).reach_cache()),
        ("scores may reach", lambda: attention(x, cache=low)),
    )
    assert math.isfinite(attention.reach_cache().retention.score_bound)
