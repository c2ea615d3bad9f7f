"""Calls for mypy's checks: it reads this file with the package, and an unused ignore is an error."""

from typing import assert_type

from torch import Tensor

from alibi_attn.attention.api import alibi_attention, head_reach
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.toeplitz import toeplitz_attention
from alibi_attn.attention.varlen import alibi_attention_varlen


def results_follow_return_lse(x: Tensor, *, flag: bool) -> None:
    assert_type(alibi_attention(x, x, x), Tensor)
    assert_type(alibi_attention(x, x, x, window=4, return_lse=True), tuple[Tensor, Tensor])
    assert_type(alibi_attention(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(alibi_attention_varlen(x, x, x, x, causal=False), Tensor)
    assert_type(forgetting_attention(x, x, x, x, return_lse=True, backend="native"), tuple[Tensor, Tensor])
    assert_type(toeplitz_attention(x, x, x, x, query_offset=3), Tensor)


def typos_and_wrong_types_are_errors(x: Tensor) -> None:
    alibi_attention(x, x, x, windows=4)  # type: ignore[call-overload]
    alibi_attention(x, x, x, window="4")  # type: ignore[arg-type]
    alibi_attention_varlen(x, x, x, x, key_mask=x)  # type: ignore[call-overload]
    forgetting_attention(x, x, x, x, causal=True)  # type: ignore[call-overload]
    toeplitz_attention(x, x, x, x, sinks=1)  # type: ignore[call-overload]
    head_reach(x, x, toleranse=0.0)  # type: ignore[call-arg]
