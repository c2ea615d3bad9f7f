"""What users would pick instead of us: causal attention, with ALiBi or without, each peer written as its users write it.

A peer is prepared once for a shape: it makes what its users make once and keep (a bias, a mask, a compiled function). Then it is
a function (query, key, value) -> output, and only that is timed. The T queries are the last of the S positions.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.decoding import attend_near, reads_near
from alibi_attn.attention.validation import make_spec

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Tensor, Tensor, Tensor, Tensor], Attention]

# What the rank-2 trick adds to a score is as large as the bias of the farthest key: about four fp32 roundings of that.
TRICK_SCORE_ERROR = 4 * 2.0**-24
_MASK_COMPILED = 32768  # create_block_mask writes T·S booleans unless it is compiled


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute it.

    Args:
        prepare: (query, key, value, slopes) -> attention, for inputs of these shapes, dtype and device.
        note: how it is written, and what a reader must know.
        biased: it computes ALiBi; if not, it is held against attention without a bias.
        longest, longest_backward: the longest input that is timed; beyond it memory or patience ends. 0 = never.
        dropout_p: the share of the weights that it drops, by the mask of a seed: it is one of ours.
        dtype: of its inputs, if not that of everybody's; they are converted before it is timed.
        score_error: by how much of the largest bias its scores may be off, beyond the rounding of its inputs' dtype.
    """

    name: str
    prepare: Prepare
    note: str
    biased: bool = True
    longest: int = 2**62
    longest_backward: int = 2**62
    score_error: float = 0.0
    dropout_p: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


def cpu_peers() -> list[Peer]:
    """Ours, and everything else that runs on a CPU."""
    return [
        Peer("ours", ours("auto"), "backend='auto'", longest=65536),
        Peer("ours, no compiler", ours("banded"), "backend='banded', for machines without g++", longest=32768),
        Peer("causal, no bias", causal, "SDPA is_causal=True; no ALiBi at all", biased=False, longest=32768),
        Peer("SDPA + dense bias", dense, "attn_mask, built once in the inputs' dtype", longest=8192),
        Peer(
            "rank-2 trick", rank_two, "the bias as two more head dimensions of causal SDPA", longest=16384,
            longest_backward=8192, score_error=TRICK_SCORE_ERROR,
        ),
        Peer("eager", eager, "softmax(q·kᵀ + bias)·v written out; the bias built once", longest=2048),
        Peer("FlexAttention", flex, "score_mod and BlockMask, compiled; no backward on a CPU", longest=4096, longest_backward=0),
    ]  # fmt: skip


def bf16_peers() -> list[Peer]:
    """Ours in bf16 beside ours in fp32, of the same numbers, and what computes ALiBi in bf16 on a CPU."""
    return [
        Peer("ours", ours("auto"), "backend='auto'", longest=65536),
        Peer("ours, fp32", ours("auto"), "backend='auto', the same numbers in fp32", longest=65536, dtype=torch.float32),
        Peer("causal, no bias", causal, "SDPA is_causal=True; no ALiBi at all", biased=False, longest=32768),
        Peer("SDPA + dense bias", dense, "attn_mask, built once in the inputs' dtype", longest=8192),
        Peer("eager", eager, "softmax(q·kᵀ + bias)·v written out; the bias built once", longest=2048),
    ]  # fmt: skip


def ours_dropping(dropout_p: float) -> Peer:
    """Ours, as a model with attention dropout trains."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        return lambda q, k, v: alibi_attention(q, k, v, slopes, dropout_p=dropout_p)

    return Peer("ours, dropout", prepare, f"backend='auto', dropout_p={dropout_p}", dropout_p=dropout_p)


def gpu_peers(*, compiled: bool = True) -> list[Peer]:
    """Ours, and everything else that may run on a GPU; `compiled` = FlexAttention is, as its users have it."""
    no_bias = "SDPA is_causal=True; no ALiBi at all"
    found = [
        Peer("ours", ours("fused"), "backend='fused'"),
        Peer("causal, no bias", causal, no_bias, biased=False),
        Peer("causal, no bias, flash", _kernel(SDPBackend.FLASH_ATTENTION), f"{no_bias}; flash kernel", biased=False),
        Peer("causal, no bias, cuDNN", _kernel(SDPBackend.CUDNN_ATTENTION), f"{no_bias}; cuDNN's kernel", biased=False),
        Peer("SDPA + dense bias", dense, "attn_mask, built once in the inputs' dtype"),
        Peer(
            "rank-2 trick", rank_two, "the bias as more head dimensions of causal SDPA", score_error=TRICK_SCORE_ERROR
        ),
        Peer("eager", eager, "softmax(q·kᵀ + bias)·v written out; the bias built once"),
        Peer(
            "FlexAttention", functools.partial(flex, compiled=compiled),
            f"score_mod and BlockMask, {'compiled for each length' if compiled else 'not compiled and without backward'}",
            longest_backward=2**62 if compiled else 0,
        ),
    ]  # fmt: skip
    return found + _flash_attn()


def decoding_peers() -> list[Peer]:
    """What answers one query with all keys of a cache, without being ours."""
    return [
        Peer("causal, no bias", causal, "SDPA of one query; no ALiBi at all", biased=False),
        Peer("SDPA + dense bias", dense, "attn_mask of one row, built once in the inputs' dtype"),
        Peer("eager", eager, "softmax(q·kᵀ + bias)·v written out; the bias built once"),
        *_flash_attn(),
    ]


def ours(backend: str) -> Prepare:
    """`alibi_attention` by a backend of ours."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        return lambda q, k, v: alibi_attention(q, k, v, slopes, backend=backend)

    return prepare


def ours_told(backend: str) -> Prepare:
    """Decoding as a layer with a `KVCache` does it, which remembers how long its keys and values are."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        known_norms, all_keys = Norms.of(key, value), ours(backend)(query, key, value, slopes)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend == "fused":  # as attend_near does it on a GPU; in the interpreter that would take the CPU's way
                return fused.decode(make_spec(q, k, v, slopes), q, k, v, known_norms)
            return attend_near(q, k, v, slopes, known_norms) if reads_near(q, k, slopes) else all_keys(q, k, v)

        return attention

    return prepare


def causal(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """SDPA without any bias. One query sees all keys (with several, torch takes the first query for position 0)."""
    is_causal = query.shape[2] > 1
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """SDPA with the bias as its mask."""
    bias = dense_bias(query, key, slopes)
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def eager(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """Written by hand, with the softmax in fp32 as the models of `transformers` have it."""
    bias = dense_bias(query, key, slopes)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    return attention


def dense_bias(query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
    """[1, H, T, S] in query's dtype, a head at a time, so that making it takes no more memory than having it."""
    t, s = query.shape[2], key.shape[2]
    j = torch.arange(s, device=query.device)
    bias = torch.empty(1, len(slopes), t, s, dtype=query.dtype, device=query.device)
    distance = j[s - t :, None] - j
    for h, slope in enumerate(slopes):
        bias[0, h] = (-slope * distance).masked_fill_(distance < 0, -torch.inf)
    return bias


def rank_two(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """m·j as a product, m·i being the same for all keys: j in digits of base 256, so that each is exact even in bfloat16."""
    _, h, n, d = query.shape
    if key.shape[2] != n:
        raise ValueError(
            f"T is {n} and S is {key.shape[2]} but the two must be equal: torch's causal mask begins at key 0"
        )
    digits = 2 if n <= 2**16 else 3
    wide = digits if query.device.type == "cpu" else 8  # the kernels of a GPU take multiples of 8
    base = 256 ** torch.arange(digits, device=query.device)
    position = (torch.arange(n, device=query.device)[:, None] // base % 256).to(query.dtype)
    factor = (slopes[:, None] * base * d**0.5).to(query.dtype)
    position, factor = (functional.pad(x, (0, wide - digits)) for x in (position, factor))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.cat([q, factor[None, :, None].expand(len(q), h, n, wide)], -1)
        k = torch.cat([k, position.expand(len(k), h, n, wide)], -1)
        v = functional.pad(v, (0, wide))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d**-0.5)[..., :d]

    return attention


def flex(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, compiled: bool = True) -> Attention:
    """FlexAttention (Dong et al. 2024, arXiv:2412.05496) with its ALiBi `score_mod` and a causal BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    t, s = query.shape[2], key.shape[2]
    first = s - t

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx - first)

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + first >= kv_idx

    mask = create_block_mask(seen, None, None, t, s, device=query.device, _compile=compiled and s > _MASK_COMPILED)
    attention: Any = flex_attention
    if compiled:
        # After eight shapes torch compiles no more and would write out all T·S scores; who trains has one shape.
        torch.compiler.reset()
        attention = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attention(q, k, v, score_mod=alibi, block_mask=mask)


def flash(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """flash-attn 2, which has [B, T, H, D]; one query goes to the function for caches, which splits the keys."""
    from flash_attn import flash_attn_func, flash_attn_with_kvcache  # type: ignore[import-not-found]

    run = flash_attn_func if query.shape[2] > 1 else flash_attn_with_kvcache

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return run(q, k, v, causal=True, alibi_slopes=slopes).transpose(1, 2)

    return attention


def reason(refusal: Exception) -> str:
    """Why a peer cannot run, as it says itself, in a line."""
    return (str(refusal).strip() or type(refusal).__name__).splitlines()[0][:200]


def _flash_attn() -> list[Peer]:
    """Where it is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return []
    return [Peer("flash-attn 2", flash, "flash_attn_func, or flash_attn_with_kvcache for one query, with alibi_slopes")]


def _kernel(backend: SDPBackend) -> Prepare:
    """SDPA without any bias by one of its kernels."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        run = causal(query, key, value, slopes)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return run(q, k, v)

        return attention

    return prepare
