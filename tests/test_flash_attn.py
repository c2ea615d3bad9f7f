"""flash-attn's functions agree with a loop over queries and keys written from flash-attn's documentation."""

import math
import random

import pytest
import torch
from torch import Tensor

from alibi_attn import alibi_attention, alibi_attention_varlen
from alibi_attn.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

DRAWS = 60


def truth(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, causal: bool, window: tuple[int, int], scale: float):
    """(out [T, H, D], lse [H, T]) of one sequence in fp64: query i is at i + S − T, and sees
    [i + S − T − left, i + S − T + right]."""
    (query_len, num_heads, _), key_len = q.shape, k.shape[0]
    group = num_heads // k.shape[1]
    left, right = window
    right = 0 if causal else right
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full((num_heads, query_len), -math.inf).double()
    for h in range(num_heads):
        for i in range(query_len):
            at = i + key_len - query_len
            seen = [j for j in range(key_len) if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)]
            if not seen:
                continue
            keys, values = k[seen, h // group].double(), v[seen, h // group].double()
            bias = 0.0 if slopes is None else -slopes[h].double() * (at - torch.tensor(seen)).abs()
            scores = scale * (keys @ q[i, h].double()) + bias
            out[i, h], lse[h, i] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def drawn(seed: int):
    """(generator of choices, query length, key length, query heads, key heads, head size)."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    heads = choose.choice([1, 2, 4])
    return (
        choose,
        choose.randint(1, 12),
        choose.randint(1, 15),
        heads,
        choose.choice([1, heads]),
        choose.choice([4, 16]),
    )


def options(choose: random.Random, batch: int, heads: int):
    window = choose.choice([(-1, -1), (2, 2), (3, 0), (0, 4), (-1, 2), (4, -1), (1, 5)])
    slopes = choose.choice([None, torch.rand(heads), torch.rand(batch, heads)])
    return window, slopes, choose.random() < 0.5, choose.choice([None, 0.3])


def assert_agrees(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, b: int, *given):
    """Compares (out, lse) of sequence b with the truth; `given` is causal, the window and the scale."""
    of_sequence = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
    for ours, expected in zip(found, truth(q, k, v, of_sequence, *given), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_batch_agrees_with_the_documentation(seed):
    choose, query_len, key_len, heads, key_heads, size = drawn(seed)
    batch = choose.choice([1, 2])
    window, slopes, causal, scale = options(choose, batch, heads)
    packed = choose.choice(["qkv", "kv", "none"])
    if packed == "qkv":
        query_len, key_heads = key_len, heads
    q = torch.randn(batch, query_len, heads, size)
    k, v = torch.randn(2, batch, key_len, key_heads, size)
    given = (0.0, scale, causal, window, 0.0, slopes, True, True)
    if packed == "qkv":
        out, lse, nothing = flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *given)
    elif packed == "kv":
        out, lse, nothing = flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *given)
    else:
        out, lse, nothing = flash_attn_func(q, k, v, *given)
    assert nothing is None
    for b in range(batch):
        assert_agrees((out[b], lse[b]), q[b], k[b], v[b], slopes, b, causal, window, scale or size**-0.5)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_packed_sequences_agree_with_the_documentation(seed):
    choose, *_, heads, key_heads, size = drawn(seed)
    lengths = [(choose.randint(0, 9), choose.randint(0, 12)) for _ in range(3)] + [(3, 5)]
    packed = choose.choice(["qkv", "kv", "none"])
    if packed == "qkv":
        lengths, key_heads = [(n, n) for n, _ in lengths], heads
    window, slopes, causal, scale = options(choose, len(lengths), heads)
    cu_q, cu_k = (torch.tensor([0, *(x[n] for x in lengths)]).cumsum(0).int() for n in (0, 1))
    q = torch.randn(int(cu_q[-1]), heads, size)
    k, v = torch.randn(2, int(cu_k[-1]), key_heads, size)
    given = (0.0, scale, causal, window, 0.0, slopes, False, True)
    if packed == "qkv":
        out, lse, _ = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), cu_q, 9, *given)
    elif packed == "kv":
        out, lse, _ = flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu_q, cu_k, 9, 12, *given)
    else:
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 12, *given)
    for b in range(len(lengths)):
        queries, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        found, given = (out[queries], lse[:, queries]), (causal, window, scale or size**-0.5)
        assert_agrees(found, q[queries], k[keys], v[keys], slopes, b, *given)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_cache_agrees_with_the_documentation(seed):
    choose, query_len, _, heads, key_heads, size = drawn(seed)
    batch, room = 2, 20
    window, slopes, causal, scale = options(choose, batch, heads)
    k_cache, v_cache = torch.randn(2, 3, room, key_heads, size)
    before = k_cache.clone(), v_cache.clone()
    rows = torch.tensor([2, 0]).int() if choose.random() < 0.5 else None
    new = torch.randn(2, batch, query_len, key_heads, size) if choose.random() < 0.5 else None
    lengths = torch.tensor([choose.randint(0, 8), choose.randint(0, 8)]).int()
    leftpad = torch.tensor([choose.randint(0, 2), 0]).int() if choose.random() < 0.5 else None
    q = torch.randn(batch, query_len, heads, size)
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *(new if new is not None else (None, None)),
        cache_seqlens=lengths,
        cache_batch_idx=rows,
        cache_leftpad=leftpad,
        softmax_scale=scale,
        causal=causal,
        window_size=window,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    for b in range(batch):
        row, held = b if rows is None else int(rows[b]), int(lengths[b])
        first = 0 if leftpad is None else int(leftpad[b])
        keys, values = (x[row, :held] for x in before)
        if new is not None:
            keys, values = torch.cat([keys, new[0, b]]), torch.cat([values, new[1, b]])
            assert torch.equal(k_cache[row, : len(keys)], keys)
            assert torch.equal(v_cache[row, len(values) :], before[1][row, len(values) :])
        given = causal, window, scale or size**-0.5
        assert_agrees((out[b], lse[b]), q[b], keys[first:], values[first:], slopes, b, *given)


def test_gradients_reach_queries_keys_values_and_slopes():
    q, k, v = (torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, window_size=(2, 3), alibi_slopes=slopes)

    assert torch.autograd.gradcheck(attend, (q, k, v, slopes))


def test_two_lengths_of_packed_sequences_agree_with_separate_calls():
    lengths = [(3, 10), (5, 7), (1, 40)]
    cu_q, cu_k = (torch.tensor([0, *(x[n] for x in lengths)]).cumsum(0) for n in (0, 1))
    q, k, v = (torch.randn(int(cu[-1]), 2, 8, requires_grad=True) for cu in (cu_q, cu_k, cu_k))
    bias = torch.randn(2, int(cu_k[-1]))
    out = alibi_attention_varlen(q, k, v, cu_q, [0.5, 0.1], cu_seqlens_k=cu_k, key_bias=bias)
    for b in range(3):
        at, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = (x.transpose(0, 1)[None] for x in (q[at], k[keys], v[keys]))
        alone = alibi_attention(*own, [0.5, 0.1], key_bias=bias[:, keys])
        torch.testing.assert_close(out[at], alone[0].transpose(0, 1))
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.shape == k.shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"softcap": 30.0}, "softcap is 30.0 but must be 0.0"),
        ({"window_size": (-2, 0)}, "window_size is .* ints of at least −1"),
        ({"window_size": 3}, "window_size is 3 but must be"),
        ({"alibi_slopes": torch.rand(3)}, "slopes"),
    ],
)
def test_what_is_not_supported_says_so(change, words):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises((ValueError, TypeError), match=words):
        flash_attn_func(q, q, q, **change)


def test_the_cache_refuses_rotations_pages_and_too_many_keys():
    q, cache = torch.randn(1, 2, 2, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="rotate q and k before the call"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=q)
    with pytest.raises(ValueError, match="pages are not supported"):
        flash_attn_with_kvcache(q, cache, cache, block_table=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="room for 4 keys but k reaches position 4"):
        flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=3)
