"""`forgetting_attention`: each token's gate scales the weights of all earlier tokens, and gates multiply."""

import dataclasses
import math
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.gates import gate_biases
from alibi_attn.attention.call.bias import Slopes, widest
from alibi_attn.attention.call.checks import GATES_RULE, check_log_fgate
from alibi_attn.attention.call.hints import check_known, shows
from alibi_attn.attention.call.options import ForgettingOptions
from alibi_attn.attention.call.reads import FORGETTING
from alibi_attn.attention.call.spec import GATE_FLOOR, GATE_STEP, AttentionSpec
from alibi_attn.attention.call.transforms import are_ordinary, autocast, may_read, transforms
from alibi_attn.attention.call.validation import check_tensor, make_spec
from alibi_attn.attention.run import dispatch
from alibi_attn.attention.run.execution import attend

_OPTIONS = ForgettingOptions.__optional_keys__


@overload
def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    **options: Unpack[ForgettingOptions[Tensor]],
) -> Tensor: ...


@overload
def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[True],
    backend: str = ...,
    **options: Unpack[ForgettingOptions[Tensor]],
) -> tuple[Tensor, Tensor]: ...


@overload
def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: bool = ...,
    backend: str = ...,
    **options: Unpack[ForgettingOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...


@shows(ForgettingOptions[Tensor])
def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    slopes: Slopes | None = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[ForgettingOptions[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which each token decides how much of everything before it is kept, [B, H, T, D] in query's dtype.

        s_ij = scale·q_i·k_j + Σ_{l=j+1..i} ln f_l − m·|i − j| + b_j
        o_i = Σ_j exp(s_ij − lse_i)·v_j ,  lse_i = ln Σ_j exp(s_ij)

    The gate of position l lies between the keys before l and the queries from l on. The last of four tokens sees

        key 0 through f_1·f_2·f_3     key 1 through f_2·f_3     key 2 through f_3     itself through no gate

    so f_0 is never used, and a constant gate f is ALiBi with the slope −ln f. Exact up to rounding: gates are summed in fp64 for
    any length (fp32 on devices without fp64). Differentiable once in all tensors, and through lse. Keys whose gates prove that
    they hold less than the tolerance are skipped.

    Use it if the text, not only the distance, should decide what is forgotten; `ALiBiAttention(forget_gate=True)` computes the
    gates too. For one number per key that does not accumulate, such as a prior, pass `key_bias` to `alibi_attention`.

    A common mistake: gates that start at sigmoid(0) = 1/2 leave a key 20 tokens back 10⁻⁶ of its weight. If far tokens matter
    and training is short, add a bias of about 4 to the logits.

    Args:
        log_fgate: ln f, the natural logarithm, at most 0, fp32 or fp64, [B, H, S] (or [B, K, S], shared by the heads of a group).
            −inf is a cut: from its position on, all keys before it are hidden, and its gradient is 0. A gate below −2²⁰ counts
            as −2²⁰; after n of them, fp64 has the digits that it has at n·2²⁰. Hidden keys and other segments have gates too: a
            sum within a segment includes only that segment's.
        slopes: m, for ALiBi times gates; None = no ALiBi.
        query_offset: position of query 0, an int; S − T by default. All queries must be among the S positions.
        query, key, value, window, scale, key_mask, segment_ids, key_bias, sink_logits, dropout_p, tolerance, backend: as for
            `alibi_attention`.
        return_lse: also return the log-sum-exp of the scores above.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or numbers, or a named backend that cannot run this call.

    >>> q = k = v = torch.randn(1, 8, 128, 64)
    >>> gates = torch.nn.functional.logsigmoid(torch.randn(1, 8, 128) + 4)  # ln f, [B, H, S]
    >>> forgetting_attention(q, k, v, gates).shape
    torch.Size([1, 8, 128, 64])

    Source: Lin et al. 2025, Forgetting Transformer (arXiv:2503.02130), eq. 9 to 12.
    """
    check_known("forgetting_attention", options, _OPTIONS)
    query, key, value = autocast(query, key, value)
    h = query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0
    slopes = [0.0] * h if slopes is None else slopes
    spec = make_spec(query, key, value, slopes, return_lse=return_lse, **options)
    FORGETTING.check(spec)
    first = check_gates(spec, log_fgate, query, options.get("query_offset"))
    name = dispatch.choose(backend, spec, query, key, value).name
    if name == fused.name and are_ordinary(log_fgate, query, key, value) and not transforms():
        bias, query_bias, start = gate_biases(  # `with_gates` in one kernel
            log_fgate, spec.key_bias, num_heads=spec.num_heads, first=first, query_len=spec.query_len
        )
        spec = dataclasses.replace(spec, key_bias=bias, query_bias=query_bias, query_start=start)
    else:
        spec = with_gates(spec, gate_sums(log_fgate), first, log_fgate)
    result = attend(spec, query, key, value, backend)
    if not isinstance(result, tuple):
        return result
    key_bias = options.get("key_bias")
    wide = torch.float64 in (query.dtype, None if key_bias is None else key_bias.dtype)
    return result[0], result[1].to(torch.float64 if wide else torch.float32)


def check_gates(spec: AttentionSpec[Tensor], log_fgate: Tensor, query: Tensor, query_offset: int | None) -> int:
    """The position of query 0.

    Raises:
        ValueError, TypeError: gates have another shape, dtype or device, or are not logarithms of gates.
    """
    check_tensor("log_fgate", log_fgate, query.device)
    first = check_log_fgate(log_fgate, spec, query_offset)
    if may_read(log_fgate) and not bool((log_fgate <= 0).all()):
        raise ValueError(GATES_RULE)
    return first


def gate_sums(log_fgate: Tensor) -> Tensor:
    """c_j = Σ_{l ≤ j} max(ln f_l, GATE_FLOOR), cuts left out, in the shape of log_fgate, in fp64 if the device has it.

    Differences of these sums are accurate to the rounding of the larger one. Cuts add nothing, because `query_start` hides the
    keys before them. A cut and a gate below the floor have no gradient.
    """
    gates = log_fgate.to(widest(log_fgate))
    gates = gates.masked_fill(gates == -math.inf, 0.0).clamp(min=GATE_FLOOR)  # nothing passes, not even NaN
    coarse = (gates.detach() / GATE_STEP).trunc() * GATE_STEP
    return coarse.cumsum(-1) + (gates - coarse).cumsum(-1)


def with_gates(
    spec: AttentionSpec[Tensor], sums: Tensor, first: int, log_fgate: Tensor | None = None
) -> AttentionSpec[Tensor]:
    """The call with gates as biases of its keys and queries.

    Args:
        sums: c_j, [B, H or K, S], of `gate_sums`; every bias is a difference of two.
        first: the position of query 0.
        log_fgate: the gates, to find cuts among them; None = there are no cuts.
    """
    start = None if log_fgate is None else _query_start(spec, log_fgate, first)
    if sums.shape[1] != spec.num_heads:
        sums = sums.repeat_interleave(spec.group, dim=1)
    bias = -sums if spec.key_bias is None else spec.key_bias.to(sums.dtype) - sums
    return dataclasses.replace(
        spec, key_bias=bias, query_bias=sums[:, :, first : first + spec.query_len], query_start=start
    )


def _query_start(spec: AttentionSpec[Tensor], log_fgate: Tensor, first: int) -> Tensor | None:
    """[B, H, T]: the position of the last cut up to each query, 0 without one; None if it is known that there are no cuts."""
    is_cut = log_fgate == -math.inf
    if may_read(log_fgate) and not bool(is_cut.any()):
        return None
    position = torch.arange(spec.key_len, device=log_fgate.device)
    start = torch.where(is_cut, position, 0).cummax(-1).values[:, :, first : first + spec.query_len]
    return start if start.shape[1] == spec.num_heads else start.repeat_interleave(spec.group, dim=1)
