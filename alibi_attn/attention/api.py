"""`alibi_attention` and the functions that describe a call: validate the arguments, build an `AttentionSpec`, run a backend."""

from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from alibi_attn.attention.backends import flex
from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.explanation import Explanation, explanation
from alibi_attn.attention.call.hints import shows
from alibi_attn.attention.call.options import AttentionOptions, SpecOptions
from alibi_attn.attention.call.reads import DROPOUT, MASKS, Reads
from alibi_attn.attention.call.transforms import autocast
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import largest_distances, visible_count
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.run import dispatch
from alibi_attn.attention.run.execution import VISITS, attend, visits
from alibi_attn.attention.run.invariant import invariant_spec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_HEAD_REACH = Reads("head_reach", VISITS)
# Dropout and sinks do not change which keys matter.
_BLOCK_MASK = Reads("certified_block_mask", MASKS | DROPOUT | {"key_bias", "sink_logits"})


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[False] = ...,
    invariant: bool = ...,
    backend: str = ...,
    **options: Unpack[AttentionOptions[Tensor]],
) -> Tensor: ...


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[True],
    invariant: bool = ...,
    backend: str = ...,
    **options: Unpack[AttentionOptions[Tensor]],
) -> tuple[Tensor, Tensor]: ...


@overload
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: bool = ...,
    invariant: bool = ...,
    backend: str = ...,
    **options: Unpack[AttentionOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...


@shows(AttentionOptions[Tensor])
def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    return_lse: bool = False,
    invariant: bool = False,
    backend: str = "auto",
    **options: Unpack[AttentionOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with linear biases (ALiBi), exact up to rounding, [B, H, T, D] in query's dtype.

        s_ij = scale·q_i·k_j − m·|i − j| + b_j
        o_i = Σ_j exp(s_ij − lse_i)·v_j ,  lse_i = ln Σ_j exp(s_ij)

    for the query at position i and the keys at positions j ≤ i, with one slope m per head. Differentiable once in query, key,
    value, slopes, key_bias and sink_logits, and through lse.

    Use it in your own layer in place of `scaled_dot_product_attention`. `ALiBiAttention` is a complete layer. For texts without
    padding use `alibi_attention_varlen`, for gates that depend on the text `forgetting_attention`, for another bias by distance
    `toeplitz_attention`.

    A common mistake: queries of [B, T, H, D], flash-attention's layout, run without an error, but T is taken as the number of
    heads. Pass `alibi_slopes(H)`, and the number of heads is checked. Encoders need `causal=False`.

    Args:
        query: [B, H, T, D]; float16, bfloat16, float32 or float64.
        key, value: [B, K, S, D], K divides H (grouped-query attention).
        slopes: m, one per head, [H] or [B, H]; a sequence, array, tensor or Parameter, used in fp32 (fp64 for fp64 input); 0 = no
            position, negative = far keys are preferred. Default: the published slopes, `alibi_slopes(H)`.
        causal: hide the keys to the right of each query. False is symmetric, −m·|i − j| on both sides.
        right_slopes: separate slopes for keys to the right (causal=False only); inf = this head never attends to the right.
        window: how many keys a query may see, including its own (on either side when not causal). An int, or [H] integers: a list
            or an array, because a tensor on a GPU is not read.
        sinks: the number of first keys that the window never hides.
        scale: factor of q·k, 1/√D by default. The bias is not scaled.
        query_offset: position of query 0. Default S − T: the queries are the last T of the S positions. An int, or an
            integer tensor, 0-d or [B], that is never read on the host. It may lie before or after all keys. With more queries
            than keys (T > S) the first T − S of a causal call precede all keys, so their outputs are zeros.
        prefix_len: [B] integers, never read on the host: a prefix language model. Every query sees the keys before it, also those
            to its right, within the window; all others are causal.
        positions, query_positions: [B, S] and [B, T], fp32 or fp64, not decreasing: the bias is −m·|p_i − p_j|. Masks and windows
            still count indices. Queries have the positions of the last T keys by default; given ones must not precede these, or,
            with causal=False, may be anywhere (without a window then). They exclude query_offset.
            Or coordinates in the plane or in space, [B, S, 2] or [B, S, 3] and [B, T, 2 or 3], in any order, with causal=False:
            the bias is −m·‖p_i − p_j‖.
        registers: the first n tokens, such as a class token, get no bias, as queries or as keys (causal=False only).
        key_mask: [B, S] bool, True = visible.
        segment_ids: [B, S] integers; attention stays within a segment. Or a pair ([B, T], [B, S]) for queries and keys.
        key_bias: b, fp32 or fp64, [B, H, S] or broadcastable to it, added to the score of each key; −inf hides the key.
            However large the biases are, a score is off only by a rounding of their difference to the b of a key near the query.
        sink_logits: [H] floating point, a learned logit of attending to nothing: exp(sink) joins the softmax denominator of the
            head, so output = o·σ(lse − sink). −inf = no sink. lse excludes it. Its gradient has its dtype: in fp32 it is
            rounded to 10⁻⁷, next to fp64 queries too.
        dropout_p: share of the attention weights to drop, in [0, 1). Which ones depends on a seed from torch's generator, and on
            sequence, head and positions, so every backend drops the same weights.
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1). Default: eps / 32 of the dtype,
            far below its rounding. 0 skips masked keys only. Gradients leave out a key at distance d only if its share of the
            query is at most tolerance / (2·(d + 64)), so no key loses more than tolerance·(1 + ln(T / 64)) of one query's weight.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 if query or key_bias is fp64), −inf
            for a query that sees no key. With it, results over disjoint sets of keys merge exactly (apply a sink once, after
            merging).
        invariant: output and lse of a query have the same bits in every call that shows it the same keys, its own among them:
            alone or in a batch, in a text that goes on, in a chunk or a single step. Causal, by `native`, which then skips
            nothing.
        backend: "auto", or the name of a backend. A named backend runs or raises.

    Returns:
        The output, or (output, lse). A query that sees no key returns zeros. Hidden keys are never used.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, or a named backend that cannot run this call.

    >>> q, k, v = torch.randn(3, 2, 8, 128, 64)  # three times [B, H, T, D]
    >>> visible = torch.arange(128) < torch.tensor([[128], [90]])  # the second text has 90 tokens
    >>> alibi_attention(q, k, v, key_mask=visible).shape
    torch.Size([2, 8, 128, 64])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    query, key, value = autocast(query, key, value)
    spec = make_spec(query, key, value, slopes, return_lse=return_lse, **options)
    if invariant:
        spec, before = invariant_spec(spec, options.get("tolerance"), backend, lambda x, count: pad(x, (count, 0)))
        found = attend(spec, pad(query, (0, 0, before, 0)), key, value, "native")
        return found[:, :, before:] if isinstance(found, Tensor) else (found[0][:, :, before:], found[1][:, :, before:])
    return attend(spec, query, key, value, backend)


def head_reach(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[SpecOptions[Tensor]],
) -> Tensor:
    """How far each head attends in this call, [B, H] int64: no query of the head reads a key with |i − j| ≥ reach.

    Like `window`, it counts the query itself. If nothing is skipped (by `dense`, for example, which "auto" chooses for short
    input), it is the largest distance in this call, plus one. It covers the keys that the backend reads: its blocks round the
    certified reach up. The values are assumed to have similar norms: a skipped value more than four times longer than the
    nearest kept ones widens the reach. It reads tensor values, so it does not work in compiled code or inside `vmap`.

    Arguments and errors are those of `alibi_attention`.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> bool((head_reach(q, k)[0, 0] < 200).all())
    True
    """
    query, key = autocast(query, key)
    spec = make_spec(query, key, key, slopes, **options)
    _HEAD_REACH.check(spec)
    with torch.no_grad():
        visited = visits(spec, query, key, None, backend)
    most = largest_distances(spec, query.device)
    return most.clone() if visited is None else torch.minimum(visited.reach, most)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[SpecOptions[Tensor]],
) -> Explanation:
    """Describes what `alibi_attention` would do with these arguments: which backend runs and why, and how far each head attends.

    Arguments and errors are those of `alibi_attention`. It reads tensor values, so it does not work in compiled code. Calls
    without gradients read other keys than training: for a training step pass tensors that require them.

    Returns:
        An object to print, or to display in a notebook, with the attributes `backend`, `reaches`, `share` and more.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> explain(q, k, v).call
    'B=1 H=8 K=8 T=128 S=128 D=64, float32 on cpu, causal'
    >>> explain(q, k, v, backend="dense")
    <Explanation: dense runs, reach 128, 100.0% of T·S>
    """
    query, key, value = autocast(query, key, value)
    spec = make_spec(query, key, value, slopes, **options)
    _check_has_values(query, "explain reads them")
    name = dispatch.choose(backend, spec, query, key, value).name
    with torch.no_grad():
        found = visits(spec, query, key, value, backend)
    of_heads, largest, *visited = (
        x.detach().cpu().resolve_neg().numpy().copy()  # slopes are cached, or the caller's
        for x in (spec.slopes, largest_distances(spec, query.device), *(found or ()))
        if x is not None
    )
    return explanation(
        spec,
        query.dtype,
        query.device,
        name,
        dispatch.verdicts(spec, name, backend, query, key, value),
        largest,
        of_heads,
        (visited, int(visible_count(spec).sum())) if visited else None,
    )


def certified_block_mask(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    block_size: int | tuple[int, int] = flex.BLOCK,
    **options: Unpack[SpecOptions[Tensor]],
) -> "BlockMask":
    """A BlockMask of the tiles that matter, for your own FlexAttention call: a fraction of the scores, the same result.

    The omitted blocks of keys hold at most `tolerance` of any query's softmax mass, and every key keeps its gradient, provided
    that the `score_mod` is ALiBi's −m·|i − j| (+ b_j with a key_bias) and the `scale` is the one given here. The mask's
    `mask_mod` covers causality, window, key mask, segments, heads that never attend to the right, and biases of −inf, so the
    score_mod need not handle them. The values are assumed to have similar norms. FlexAttention also multiplies hidden keys and
    values, so clear NaN and inf from them first.

    Args:
        block_size: queries and keys per block, a multiple of 64, or a pair (queries, keys) of such numbers. FlexAttention's
            kernels need multiples of their own block sizes.
        options: those of `alibi_attention`; dropout_p, sink_logits and return_lse have no effect.

    Returns:
        A BlockMask of [B, H, T, S]; it holds one number per head and block.

    Raises:
        ValueError, TypeError: as `alibi_attention`; a block_size that is not a multiple of 64; no queries or no keys.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> mask = certified_block_mask(q, k)
    >>> mask.shape, mask.kv_num_blocks[0, 0].tolist()  # the steepest head
    ((1, 8, 1024, 1024), [1, 2, 2, 2, 2, 2, 2, 2])

    Source: Dong et al. 2024, FlexAttention (arXiv:2412.05496).
    """
    blocks = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(blocks) != 2 or any(type(x) is not int or x < TILE or x % TILE for x in blocks):
        raise ValueError(
            f"block_size is {block_size!r} but must be a multiple of {TILE}, or a pair of them for queries and keys; "
            "FlexAttention's default is 128"
        )
    query, key = autocast(query, key)
    spec = make_spec(query, key, key, slopes, **options)
    _BLOCK_MASK.check(spec)
    _check_has_values(query, "a BlockMask needs them")
    if spec.query_len == 0 or spec.key_len == 0:
        raise ValueError(
            f"there are {spec.query_len} queries and {spec.key_len} keys but a BlockMask needs at least one of each"
        )
    return flex.block_mask(spec, query.detach(), key.detach(), None, block_size=blocks)


def _check_has_values(query: Tensor, why: str) -> None:
    if query.is_meta:
        raise ValueError(f"query is on the meta device, which holds no values, but {why}; pass real tensors")
