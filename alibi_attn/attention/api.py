"""`alibi_attention`: the one function. It checks its arguments, describes the call as an `AttentionSpec`, and has it computed."""

from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
from torch import Tensor

from alibi_attn.attention import dispatch
from alibi_attn.attention.backends import flex
from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.execution import attend, autocast
from alibi_attn.attention.explain import call_line, dense_line, head_lines
from alibi_attn.attention.validation import AttentionOptions, SegmentIds, SpecOptions, make_spec
from alibi_attn.attention.visibility import largest_distance, visible_count

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@overload
def alibi_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = ..., *, return_lse: Literal[False] = ...,
    backend: str = ..., **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip


@overload
def alibi_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = ..., *, return_lse: Literal[True],
    backend: str = ..., **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def alibi_attention(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None = ..., *, return_lse: bool = ...,
    backend: str = ..., **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    window: int | None = None,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    key_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with linear biases, softmax(scale·q·kᵀ − m·|i − j| + b_j)·v, [B, H, T, D] in query's dtype.

    Exact to rounding. Differentiable once in query, key, value, slopes and key_bias, and through lse.

    Args:
        query: [B, H, T, D]; float16, bfloat16, float32 or float64.
        key, value: [B, K, S, D], K divides H (grouped-query attention).
        slopes: m, one a head [H] or [B, H]; sequence, array, tensor or Parameter, used in fp32 (fp64 for fp64 input); 0 = no
            position, negative = far keys are preferred. Default `alibi_slopes(H)`, the published ones.
        causal: keys to the right are not seen. False is symmetric, −m·|i − j| on both sides.
        right_slopes: own slopes for keys to the right (causal=False only); inf = this head never looks right.
        window: how many keys a query may see, itself included (to either side when not causal).
        scale: factor of q·k, 1/√D by default. The bias is not scaled.
        query_offset: position of query 0; S − T by default: the queries are the last T of the S positions. An int, or an
            integer tensor, 0-d or [B], that is never read on the host. It may lie before or after all the keys.
        key_mask: [B, S] bool, True = may be seen.
        segment_ids: [B, S] integers, attention within a segment only; or a pair ([B, T], [B, S]) for queries and keys.
        key_bias: b, fp32 or fp64, [B, H, S] or what broadcasts to it, added to the score of each key; −inf = may not be seen.
            However large the numbers are, a score is off by a rounding of their difference to the b of a key near the query.
        dropout_p: share of the attention weights that are dropped, in [0, 1); which ones is a function of a seed from torch's
            generator and of sequence, head and positions: every backend drops the same.
        tolerance: the largest share of a query's softmax mass that may be skipped, in [0, 1); default eps / 32 of the dtype, far
            below its rounding; 0 skips only what is forbidden.
        return_lse: also return the natural log-sum-exp of the scores, [B, H, T] fp32 (fp64 where query or key_bias is), −inf
            where nothing is seen. Results over disjoint sets of keys merge exactly with it.
        backend: "auto", or the name of one: it runs or raises.

    Returns:
        The output, or (output, lse). A query that may see nothing gives zeros. A key that may not be seen is never used.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, or a named backend that cannot run this call.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> alibi_attention(q, k, v).shape
    torch.Size([1, 8, 128, 64])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    query, key, value = autocast(query, key, value)
    spec = make_spec(
        query, key, value, slopes, causal=causal, right_slopes=right_slopes, window=window, scale=scale,
        query_offset=query_offset, key_mask=key_mask, segment_ids=segment_ids, key_bias=key_bias, dropout_p=dropout_p,
        tolerance=tolerance, return_lse=return_lse,
    )  # fmt: skip
    return attend(spec, query, key, value, backend)


def head_reach(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[SpecOptions],
) -> Tensor:
    """How far every head really looks, [B, H] int64: no query of the head reads a key with |i − j| ≥ reach.

    Like `window` it counts the query itself. Where nothing is skipped (by `dense`, for example, which "auto" takes for short
    input) it is the largest distance that occurs in this call, plus one. It is what the backend reads: its blocks round the
    certified reach up. Values are taken to be of like length: a skipped value more than four times longer than the nearest kept
    ones widens the reach.

    Arguments and errors are those of `alibi_attention`.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> bool((head_reach(q, k)[0, 0] < 200).all())
    True
    """
    query, key = autocast(query, key)
    spec = make_spec(query, key, key, slopes, **options)
    name = dispatch.choose(backend, spec, query, key, key)
    with torch.no_grad():
        visited = dispatch.visits(name, spec, query, key, None)
    most = largest_distance(spec, query.device)[:, None].expand(-1, spec.num_heads)
    return most.clone() if visited is None else torch.minimum(visited[0], most)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Slopes | None = None,
    *,
    backend: str = "auto",
    **options: Unpack[SpecOptions],
) -> str:
    """What `alibi_attention` would do with these arguments, in words: who runs it and why, and how far each head looks.

    Arguments and errors are those of `alibi_attention`. It reads tensor values, so it is not for compiled code.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> print(explain(q, k, v).splitlines()[0])
    B=1 H=8 K=8 T=128 S=128 D=64, float32 on cpu, causal
    """
    query, key, value = autocast(query, key, value)
    spec = make_spec(query, key, value, slopes, **options)
    name = dispatch.choose(backend, spec, query, key, value)
    with torch.no_grad():
        visited = dispatch.visits(name, spec, query, key, value)
    lines = [
        call_line(spec, query.dtype, query.device),
        *dispatch.backend_lines(spec, name, backend, query, key, value),
    ]
    if visited is None:
        return "\n".join([*lines, dense_line(spec, name)])
    reach = torch.minimum(visited[0], largest_distance(spec, query.device)[:, None])
    slopes, reaches, scores = (x.detach().cpu().resolve_neg().numpy() for x in (spec.slopes, reach, visited[1]))
    seen = int(visible_count(spec).sum()) * spec.num_heads
    return "\n".join([*lines, *head_lines(spec, slopes, reaches, scores, seen)])


def certified_block_mask(
    query: Tensor,
    key: Tensor,
    slopes: Slopes | None = None,
    *,
    block_size: int = flex.BLOCK,
    **options: Unpack[SpecOptions],
) -> "BlockMask":
    """The BlockMask of the tiles that matter, for a FlexAttention of your own: a fraction of the scores, the same result.

    Blocks of keys that are left out weigh at most `tolerance` of any query's softmax mass, if the `score_mod` is ALiBi's
    −m·|i − j| (+ b_j with a key_bias) and the `scale` is this one. Its `mask_mod` says who may see whom: causality, window, key
    mask, segments, heads that never look right, biases of −inf; the score_mod needs to know nothing of these. Values are taken to
    be of like length. FlexAttention multiplies keys and values that nobody may see, so NaN and inf in them are yours to clear.

    Args:
        block_size: queries and keys of a block, a multiple of 64. FlexAttention's kernels want it to be a multiple of theirs.
        options: those of `alibi_attention`; dropout_p and return_lse change nothing.

    Returns:
        A BlockMask of [B, H, T, S]; it holds (T / block_size)·(S / block_size) numbers a head.

    Raises:
        ValueError, TypeError: as `alibi_attention`, a block_size that is no multiple of 64, no query or no key.

    >>> q = k = torch.randn(1, 8, 1024, 64)
    >>> mask = certified_block_mask(q, k)
    >>> mask.shape, mask.kv_num_blocks[0, 0].tolist()  # the steepest head
    ((1, 8, 1024, 1024), [1, 2, 2, 2, 2, 2, 2, 2])

    Source: Dong et al. 2024, FlexAttention (arXiv:2412.05496).
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < TILE or block_size % TILE:
        raise ValueError(
            f"block_size is {block_size!r} but must be a multiple of {TILE}; FlexAttention's default is 128"
        )
    query, key = autocast(query, key)
    spec = make_spec(query, key, key, slopes, **options)
    if spec.query_len == 0 or spec.key_len == 0:
        raise ValueError(
            f"there are {spec.query_len} queries and {spec.key_len} keys but a BlockMask needs one of each"
        )
    return flex.block_mask(spec, query.detach(), key.detach(), None, block_size=block_size)
