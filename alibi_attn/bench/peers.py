"""What users would pick instead of us: each peer computes causal ALiBi attention (or says what it leaves out).

A peer is a function (query, key, value, slopes) -> output, with the longest input it is run on here.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.bias import alibi_bias

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute it.

    Args:
        longest, longest_backward: the longest input that is timed; beyond it memory or patience ends. 0 = never.
        exact: it computes ALiBi, and is checked to.
        note: what a reader must know.
    """

    name: str
    run: Attention
    longest: int
    longest_backward: int
    exact: bool = True
    note: str = ""


def peers() -> list[Peer]:
    """Ours, and everything else that runs on this machine."""
    return [
        Peer("ours", lambda q, k, v, m: alibi_attention(q, k, v, m), 65536, 65536, note="backend='auto'"),
        Peer("ours, no compiler", _banded, 32768, 32768, note="backend='banded', for machines without g++"),
        Peer("causal, no bias", _causal, 32768, 32768, exact=False, note="SDPA is_causal=True; no ALiBi at all"),
        Peer("SDPA + dense bias", _dense, 8192, 8192, note="the bias is built in every call, as models do"),
        Peer("rank-2 trick", _rank_two, 16384, 8192, note="bias as two more head dimensions of causal SDPA"),
        Peer("eager", _eager, 2048, 2048, note="softmax(q·kᵀ + bias)·v written out"),
        Peer("FlexAttention", _flex, 4096, 0, note="compiled; it has no backward on a CPU"),
    ]


def _banded(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    return alibi_attention(query, key, value, slopes, backend="banded")


def _causal(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    bias = alibi_bias(slopes, query.shape[2], key.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])


def _eager(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores + alibi_bias(slopes, query.shape[2], key.shape[2])).softmax(-1) @ value


def _rank_two(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """m·j as a product: j = 256·(j // 256) + j % 256, so that every factor is exact even in bfloat16."""
    b, h, n, d = query.shape
    j = torch.arange(n)
    position = torch.stack([j // 256, j % 256], -1).to(key.dtype).expand(b, h, n, 2)
    factor = torch.stack([slopes * 256, slopes], -1).to(query.dtype) * d**0.5
    query = torch.cat([query, factor[None, :, None].expand(b, h, n, 2)], -1)
    key, value = torch.cat([key, position], -1), functional.pad(value, (0, 2))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=d**-0.5)[..., :d]


_COMPILED: list[Attention] = []


def _flex(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    if not _COMPILED:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s - slopes[h] * (i - j)

            n = query.shape[2]
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
            with torch.no_grad():
                out: Tensor = flex_attention(query, key, value, score_mod=score, block_mask=mask)
            return out

        _COMPILED.append(torch.compile(attention))
    return _COMPILED[0](query, key, value, slopes)
