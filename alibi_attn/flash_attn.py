"""flash-attn's functions with flash-attn's signatures: change one import, and `alibi_slopes` get gradients on any device.

    from alibi_attn.flash_attn import flash_attn_func    # instead of: from flash_attn import flash_attn_func

Signatures, layouts and defaults are those of flash-attn 2.8: [B, T, H, D], causal=False, window_size=(left, right) with −1 for no
limit, and T ≠ S aligned at the end. Differences:

* every dtype and device of `alibi_attention`, and gradients of the slopes; always deterministic
* a query that sees no key returns 0 with lse −inf (theirs is +inf)
* the third result of return_attn_probs is None: no probabilities are built
* softcap, block_table and rotary arguments raise an error that names an alternative

Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), and the documentation of its functions.
"""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.call.spec import MAX_POSITION, AttentionSpec
from alibi_attn.attention.call.transforms import autocast, may_read
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend
from alibi_attn.attention.varlen import attend_packed, packed_bounds

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

WindowSize = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """softmax(softmax_scale·q·kᵀ − m·|i + S − T − j|)·v, [B, T, H, D].

    Args:
        q: [B, T, H, D].
        k, v: [B, S, K, D], K divides H.
        dropout_p: share of the weights to drop; 0.0 during evaluation.
        softmax_scale: 1/√D by default.
        causal: aligned at the end: query t sees keys up to t + S − T.
        window_size: (left, right): query t sees keys from t + S − T − left to t + S − T + right; −1 = no limit.
        alibi_slopes: m, [H] or [B, H], with gradients; None = no bias.
        deterministic: has no effect: results always are.
        return_attn_probs: also return lse, [B, H, T], and None.

    Raises:
        ValueError: softcap is not 0, or wrong shapes or numbers.

    >>> q = k = v = torch.randn(2, 50, 8, 64)
    >>> flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.full((8,), 0.5)).shape
    torch.Size([2, 50, 8, 64])
    """
    query, key, value = (_heads_first(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v)))
    query, key, value = autocast(query, key, value)
    spec = call_of(query, key, value, alibi_slopes, causal, window_size, softmax_scale, dropout_p, softcap)
    output, lse = _with_lse(attend(spec, query, key, value, "auto"))
    return _result(output.transpose(1, 2), lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` for queries, keys and values in one tensor, [B, T, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, axis=2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` for keys and values in one tensor, [B, S, 2, K, D]."""
    k, v = _unpacked("kv", kv, 2, axis=2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within each of B packed sequences, [N_q, H, D].

    The lengths are read on the host, which synchronizes a GPU once; for sequences whose queries and keys have the same lengths,
    `alibi_attention_varlen` does not.

    Args:
        q: [N_q, H, D], the queries of all sequences, one sequence after the other.
        k, v: [N_k, K, D].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], the start of each sequence and then N_q or N_k.
        max_seqlen_q, max_seqlen_k: have no effect.
        return_attn_probs: also return lse, [H, N_q], and None.
        others: as for `flash_attn_func`.

    Raises:
        ValueError: softcap is not 0, block_table is given, or wrong shapes or numbers.
    """
    _check_block_table(block_table)
    query, key, value = (_heads_first(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v)))
    query, key, value = autocast(query, key, value)
    bounds, key_bounds = packed_bounds(cu_seqlens_q, cu_seqlens_k, q, k)
    of_sequences = None
    if alibi_slopes is not None and alibi_slopes.ndim == 2:
        if alibi_slopes.shape != (len(bounds) - 1, query.shape[1]):
            wanted = [len(bounds) - 1, query.shape[1]]
            raise ValueError(f"alibi_slopes has shape {list(alibi_slopes.shape)} but must be [H] or [B, H] = {wanted}")
        of_sequences = alibi_slopes.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
        alibi_slopes = None
    spec = call_of(query, key, value, alibi_slopes, causal, window_size, softmax_scale, dropout_p, softcap)
    output, lse = _with_lse(attend_packed(spec, query, key, value, bounds, key_bounds, "auto", of_sequences))
    return _result(output[0].transpose(0, 1), lse[0], return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` for queries, keys and values in one tensor, [N, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, axis=1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` for keys and values in one tensor, [N_k, 2, K, D]."""
    k, v = _unpacked("kv", kv, 2, axis=1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of a fixed size, [B, T, H, D]; new keys and values are written into it first. No gradients.

    Args:
        q: [B, T, H, D], the last T positions.
        k_cache, v_cache: [B_cache, S_cache, K, D].
        k, v: [B, T_new, K, D], written in place from position cache_seqlens on.
        cache_seqlens: how many keys of each sequence the cache holds before k, an int or int32 [B]; None = all, without k.
        cache_batch_idx: int32 [B], the row of the cache of each sequence; the rows are copied. None = row b.
        cache_leftpad: int32 [B], the first key of each sequence; None = 0.
        rotary_interleaved, num_splits: have no effect.
        return_softmax_lse: also return lse, [B, H, T].
        others: as for `flash_attn_func`.

    Raises:
        ValueError: rotary arguments, block_table or softcap, or wrong shapes.
    """
    _check_block_table(block_table)
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin are given; rotate q and k before the call, or omit them")
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or neither")
    if k is not None and cache_seqlens is None:
        raise ValueError("k is given without cache_seqlens, the position from which on it is written")
    batch, device = q.shape[0], q.device
    rows = torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx.long()
    held = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    stop = torch.as_tensor(held, device=device).long().expand(batch)
    if k is not None and v is not None:
        at = stop[:, None] + torch.arange(k.shape[1], device=device)
        if may_read(at) and bool((at >= k_cache.shape[1]).any()):
            raise ValueError(
                f"the cache has room for {k_cache.shape[1]} keys but k reaches position {int(at.max())}; make it larger"
            )
        k_cache[rows[:, None], at] = k.to(k_cache.dtype)
        v_cache[rows[:, None], at] = v.to(v_cache.dtype)
        stop = stop + k.shape[1]
    key, value = (x[:batch] if cache_batch_idx is None else x[rows] for x in (k_cache, v_cache))
    position = torch.arange(k_cache.shape[1], device=device)
    visible = position < stop[:, None]
    if cache_leftpad is not None:
        visible &= position >= cache_leftpad[:, None]
    query, key, value = (_heads_first(name, x, 4) for name, x in (("q", q), ("k_cache", key), ("v_cache", value)))
    spec = call_of(
        query,
        key,
        value,
        alibi_slopes,
        causal,
        window_size,
        softmax_scale,
        0.0,
        softcap,
        key_mask=visible,
        query_offset=stop - q.shape[1],
    )
    output, lse = _with_lse(attend(spec, query, key, value, "auto"))
    return (output.transpose(1, 2), lse) if return_softmax_lse else output.transpose(1, 2)


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    causal: bool,
    window_size: WindowSize,
    scale: float | None,
    dropout_p: float,
    softcap: float,
    *,
    key_mask: Tensor | None = None,
    query_offset: Tensor | None = None,
) -> AttentionSpec[Tensor]:
    """The call in our words: a window counts the query itself, and keys to the right have their own."""
    if softcap != 0.0:
        raise ValueError(
            f"softcap is {softcap} but must be 0.0: capped scores have no kernel here; use FlexAttention with "
            "alibi_attn.certified_block_mask's score_mod and a tanh"
        )
    left, right = _window_sizes(window_size)
    causal = bool(causal) or right == 1
    spec = make_spec(
        query,
        key,
        value,
        [0.0] * query.shape[1] if alibi_slopes is None else alibi_slopes,
        causal=causal,
        window=left,
        scale=scale,
        dropout_p=dropout_p,
        key_mask=key_mask,
        query_offset=query_offset,
        return_lse=True,
    )
    if not causal and left != right:
        spec = dataclasses.replace(spec, right_window=MAX_POSITION if right is None else right)
    return spec


def _window_sizes(window_size: WindowSize) -> tuple[int | None, int | None]:
    """(left, right) as numbers of keys that count the query itself; None = no limit."""
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or any(type(x) is not int or x < -1 for x in window_size)
    ):
        raise ValueError(
            f"window_size is {window_size!r} but must be (left, right), ints of at least −1; −1 = no limit"
        )
    left, right = (None if x == -1 else x + 1 for x in window_size)
    return left, right


def _heads_first(name: str, x: Tensor, axes: int) -> Tensor:
    """[B, T, H, D] -> [B, H, T, D], or [N, H, D] -> [1, H, N, D]; a view."""
    shape = "[B, T, H, D]" if axes == 4 else "[N, H, D]"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor but is {type(x).__name__}")
    if x.ndim != axes:
        raise ValueError(f"{name} has shape {list(x.shape)} but must be {shape}")
    return x.transpose(1, 2) if axes == 4 else x.transpose(0, 1)[None]


def _unpacked(name: str, x: Tensor, count: int, *, axis: int) -> tuple[Tensor, ...]:
    if x.ndim != axis + 3 or x.shape[axis] != count:
        shape = f"[B, T, {count}, H, D]" if axis == 2 else f"[N, {count}, H, D]"
        raise ValueError(f"{name} has shape {list(x.shape)} but must be {shape}")
    return x.unbind(axis)


def _check_block_table(block_table: Tensor | None) -> None:
    if block_table is not None:
        raise ValueError("block_table is given but pages are not supported; pass keys and values without pages")


def _with_lse(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    assert isinstance(result, tuple)
    return result


def _result(output: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    return (output, lse, None) if return_attn_probs else output
