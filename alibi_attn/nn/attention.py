"""ALiBiAttention: a self-attention layer, four linear layers around `alibi_attention`.

Press et al. 2022, sec. 3 (arXiv:2108.12409). Next: `block.py`, `cache/cache.py`.
"""

import math
import operator
import sys
from typing import Any, Never

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.checks import default_tolerance
from alibi_attn.attention.call.hints import by_position, hides_unknown, unknown_argument
from alibi_attn.attention.call.options import Window
from alibi_attn.attention.call.part_options import free_values
from alibi_attn.attention.call.query_positions import check_layer
from alibi_attn.attention.kept import Kept, attend
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache.appending import pieces
from alibi_attn.nn.cache.retention import by_gates, within_reach
from alibi_attn.nn.constructor_arguments import checks_names
from alibi_attn.nn.gates import ForgetGates
from alibi_attn.nn.input_checks import check_call
from alibi_attn.nn.positional import HeadSlopes
from alibi_attn.reach import UNLIMITED, score_bound_of_norms, static_reach

_QK_NORM_EPS = 1e-6  # only keeps a zero vector zero; the bound ‖q‖ ≤ √D·max|weight| holds for any eps ≥ 0


class ALiBiAttention(nn.Module):
    """Self-attention with linear biases: x [B, T, embed_dim] → [B, T, embed_dim].

        softmax(q·kᵀ/√D − m·|i − j|)·v,   q, k, v = linear layers of x, one fixed slope m per head

    It has no maximum length and (with fixed slopes) no parameters except the linear layers' own: `q_proj`, `k_proj`, `v_proj`,
    `out_proj`. Use it in place of `nn.MultiheadAttention`; `ALiBiTransformerBlock` adds norms and the feed-forward layer.

    A common mistake: adding position embeddings to x as well, which fail beyond the trained length. And masks are True where a
    token is visible, the opposite of torch's `key_padding_mask`.

    Args:
        embed_dim: a multiple of `num_heads`; the head size is D = embed_dim / num_heads.
        num_heads: H.
        num_kv_heads: K, which divides H: grouped-query attention (1 is multi-query). Default H.
        bias: add a bias to the linear layers.
        causal: False for encoders: the bias is symmetric.
        window: the number of keys a query may see, including itself; None is no limit. Or one number per head, [H].
        sinks: the number of first keys that the window never hides.
        registers: the number of first tokens without a bias, such as a class token (causal=False only).
        dropout_p: of attention weights, in training only.
        slopes: [H]; default `alibi_slopes(num_heads)`. Kept in fp32 whatever dtype the module is cast to, and, unless
            learned, out of the state dict.
        learn_slopes: make them a parameter (Press et al. saw no gain in extrapolation from it).
        qk_norm: RMS-normalize queries and keys per head, with a weight (`q_norm`, `k_norm`) and no offset, so that
            the weights alone bound every score.
        forget_gate: add the gates of the Forgetting Transformer. For every head and token `gate_proj` computes, in
            fp32, the share of all earlier tokens that is kept: the sigmoid of a linear layer with torch's default
            weights and a bias of 0, so about one half at first. `slopes=[0.0] * H` uses gates alone. Causal only.
        kv_dim: make this a cross-attention layer: keys and values come from `memory` [B, S, kv_dim], all of it visible
            (`causal` does not apply). Source and target share no position axis, so there is no bias unless slopes are given;
            then both count from 0, and the bias is symmetric.

    Raises:
        TypeError, ValueError: inconsistent arguments here; inputs that do not fit in `forward`.

    >>> import torch
    >>> attention = ALiBiAttention(embed_dim=64, num_heads=8)
    >>> attention(torch.zeros(2, 10, 64), key_mask=torch.ones(2, 10, dtype=torch.bool)).shape
    torch.Size([2, 10, 64])

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409); QK-norm: Henry et al. 2020 (arXiv:2010.04245); gates: Lin et al.
    2025 (arXiv:2503.02130), whose code also starts the bias at 0.
    """

    # How a layer attends; `context_parallel` replaces it on an instance.
    attend = staticmethod(attend)

    @checks_names()
    def __init__(
        self, embed_dim: int, num_heads: int, *, num_kv_heads: int | None = None, bias: bool = False, causal: bool = True,
        window: Window[Tensor] | None = None, sinks: int = 0, registers: int = 0, dropout_p: float = 0.0,
        slopes: Slopes | None = None, learn_slopes: bool = False, qk_norm: bool = False, forget_gate: bool = False,
        kv_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = check_layer(
            embed_dim, num_heads, num_kv_heads, window=window, sinks=sinks, registers=registers, dropout_p=dropout_p,
            causal=causal, forget_gate=forget_gate, values=free_values,
        )  # fmt: skip
        if kv_dim is not None:
            if operator.index(kv_dim) < 1 or window is not None or forget_gate or registers:
                raise ValueError(
                    f"kv_dim is {kv_dim}, window {window}, registers {registers} and forget_gate {forget_gate} but "
                    "cross-attention needs kv_dim ≥ 1, no window, no registers and no gates: source and target share no axis"
                )
            causal, slopes = False, [0.0] * num_heads if slopes is None else slopes
        self.kv_dim = kv_dim
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, kv_width = embed_dim // num_heads, num_kv_heads * (embed_dim // num_heads)
        self.causal, self.sinks, self.registers, self.dropout_p = causal, sinks, registers, dropout_p
        self.slopes = HeadSlopes(num_heads, slopes, learned=learn_slopes)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim if kv_dim is None else kv_dim, kv_width, bias=bias)
        self.v_proj = nn.Linear(embed_dim if kv_dim is None else kv_dim, kv_width, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=_QK_NORM_EPS) if qk_norm else None for _ in range(2))
        self.gate_proj = ForgetGates(embed_dim, num_heads) if forget_gate else None

    @hides_unknown
    def forward(
        self,
        x: Tensor,
        *more: Never,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        prefix_len: Tensor | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Self-attention over x and the cached tokens; appends x to the cache.

        Args:
            x: [B, T, embed_dim]: the positions after those in the cache.
            cache: this layer's `KVCache()`, or the result of `reach_cache()`. However a sequence is split into chunks, the
                outputs equal those of one full pass.
            key_mask: [B, S] bool, True = may be seen; S covers the cached keys, then the T new ones. A few new tokens with a
                long cache read only the keys within reach, unless a row of the mask has a hole.
            segment_ids: [B, S] integers, the same S: attend within a segment only.
            prefix_len: [B] integers: every token sees the first ones, as for `alibi_attention`. With a cache, the first call
                must hold the whole prefix.
            positions: [B, S] fp32 or fp64, the same S: the bias is −m·|p_i − p_j|, as for `alibi_attention`. Or coordinates in
                the plane or in space, [B, S, 2] or [B, S, 3], if the layer is not causal.
            memory, memory_mask: [B, S, kv_dim] and [B, S] bool, True = may be seen; for cross-attention layers, instead of the
                other arguments.
        """
        if more:
            raise by_position("ALiBiAttention", more)
        if unknown:
            raise unknown_argument("ALiBiAttention", unknown)
        given = {"key_mask": key_mask, "segment_ids": segment_ids, "prefix_len": prefix_len, "positions": positions}
        check_call(self, x, cache, given, memory, memory_mask)
        sizes = [] if cache is None else pieces(cache, x.shape[1])
        if len(sizes) > 1:
            return torch.cat([self.forward(chunk, cache=cache) for chunk in x.split(sizes, dim=1)], dim=1)
        gates, slopes = None if self.gate_proj is None else self.gate_proj(x), self.slopes.values
        query = self._heads(self.q_proj(x))
        source = x if memory is None else memory
        key, value = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = _normed(self.q_norm, query), _normed(self.k_norm, key)
        if cache is not None:
            kept = cache.append(key, value, gates, layer=self, query=query, slopes=slopes)
        else:
            kept = [Kept(key, value, log_fgate=gates)]
        if memory is not None:
            given["key_mask"] = memory_mask
        if x.shape[1] == 1:  # the last token has no key to its right
            given["prefix_len"] = None
        mixed = self.attend(
            query,
            kept,
            slopes,
            causal=self.causal,
            window=self.window,
            sinks=self.sinks_of_window,
            registers=self.registers,
            dropout_p=self.dropout_p if self.training else 0.0,
            **given,
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    @property
    def sinks_of_window(self) -> int:
        """The first keys that a cache must keep; 0 without a window, which alone hides them."""
        return 0 if self.window is None else self.sinks

    def score_bound(self) -> float:
        """U, an upper bound of every scaled score |q·k|/√D of this layer for any input; requires qk_norm=True.

            U = D·max|g_q|·max|g_k|/√D, with the current weights g of the norms, plus an allowance for rounding

        Raises:
            ValueError: the layer has no qk_norm, so its weights do not bound the scores.
        """
        if self.q_norm is None or self.k_norm is None:
            raise ValueError(
                "without qk_norm=True the weights do not bound the scores; create the layer with qk_norm=True, or pass "
                "reach_cache or static_reach a score_bound= of all |q·k|/√D"
            )
        of_query, of_key = (float(norm.weight.detach().abs().max()) for norm in (self.q_norm, self.k_norm))
        return score_bound_of_norms(self.head_dim**-0.5, self.head_dim, of_query, of_key)

    def reach_cache(
        self, *, tolerance: float | None = None, score_bound: float | None = None, capacity: int | None = None
    ) -> KVCache:
        """A cache that keeps only the keys this layer's heads can still need; arguments and errors as in `static_reach`.

        Slopes determine these keys before any text exists. With forget gates they depend on the text: keys are dropped once the
        gates prove that no later query needs them.

        Args:
            capacity: of `KVCache`: for steps that a CUDA graph replays. Heads whose reach is shorter decode indefinitely.

        >>> layer = ALiBiAttention(64, 8, qk_norm=True)
        >>> with torch.no_grad():
        ...     cache = layer.reach_cache()
        ...     output = layer(torch.randn(1, 500, 64), cache=cache)
        >>> cache.kept[:4]
        (52, 106, 218, 447)
        """
        if not self.causal:
            raise ValueError("reach_cache needs causal=True: a cache is for tokens that arrive in order")
        bound, tolerance = self._bound_and_tolerance(score_bound, tolerance)
        options: Any = {"num_kv_heads": self.num_kv_heads, "tolerance": tolerance}
        slopes = self.slopes.values.tolist()
        if self.gate_proj is not None:
            bound += (self.head_dim + 16) * 2.0**-24 * bound  # scores and λ are computed in fp32
            return KVCache(capacity=capacity, retention=by_gates(slopes, score_bound=bound, **options))
        reach = self.static_reach(tolerance=tolerance, score_bound=bound)
        retention = within_reach(reach, score_bound=bound, slopes=slopes, sinks=self.sinks_of_window, **options)
        return KVCache(capacity=capacity, retention=retention)

    def static_reach(
        self, *, tolerance: float | None = None, score_bound: float | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """The certified reach of every head before any input exists, [H] int64.

        All keys at |i − j| ≥ reach together have at most `tolerance` of any query's softmax mass, because every query sees
        its own key:

            reach = ⌈(2U + ln(1/ε) − ln(1 − e^(−m))) / m⌉,   U = `score_bound()`

        It counts the query itself, like `window`, which limits it. A head with a slope ≤ 0 has no reach: it gets 2⁶⁰.

        Args:
            tolerance: ε in [0, 1); default eps / 32 of the weights' dtype, as in `alibi_attention`.
            score_bound: U, if known; default `score_bound()`, which needs qk_norm=True.
            key_mask: the mask the layer will be called with. A query whose own key is hidden has no such guarantee.

        Raises:
            ValueError: there is neither a bound nor qk_norm, the bound is negative, the tolerance is outside [0, 1), or the key
                mask hides a key.

        >>> ALiBiAttention(64, 8, qk_norm=True).static_reach()[:3].tolist()
        [53, 107, 219]

        Source: `docs/maths.md`; QK-norm: Henry et al. 2020 (arXiv:2010.04245).
        """
        bound, tolerance = self._bound_and_tolerance(score_bound, tolerance)
        if key_mask is not None and not bool(key_mask.all()):
            raise ValueError(
                "key_mask hides keys, and a query whose own key is hidden has no static reach; pass no key_mask and remove "
                "the padding, or let alibi_attention compute the reach of each call"
            )
        # Scores and λ are computed in fp32, each within (D + 16) units of its bound; a symmetric head has two tails of ε/2.
        slack = 2 * (self.head_dim + 16) * 2.0**-24 * bound + (0.0 if self.causal else math.log(2.0))
        slopes = self.slopes.values.detach().cpu().double().tolist()
        reach = torch.tensor([static_reach(slope, bound, tolerance, slack=slack) for slope in slopes], device="cpu")
        if self.window is None:
            return reach
        windows = self.window if isinstance(self.window, tuple) else [self.window] * self.num_heads
        return reach.minimum(torch.tensor([min(window, UNLIMITED) for window in windows], device="cpu"))

    def _bound_and_tolerance(self, score_bound: float | None, tolerance: float | None) -> tuple[float, float]:
        """U and ε, with the defaults of this layer."""
        bound = self.score_bound() if score_bound is None else min(score_bound, sys.float_info.max)
        tolerance = default_tolerance(self.q_proj.weight.dtype) if tolerance is None else tolerance
        if bound < 0.0:
            raise ValueError(f"score_bound is {bound} but bounds |q·k|/√D: it must not be negative")
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is {tolerance} but is a share of softmax mass in [0, 1)")
        return bound, tolerance

    def extra_repr(self) -> str:
        optional = {name: getattr(self, name) for name in ("kv_dim", "window", "sinks", "registers", "dropout_p")}
        optional |= {"qk_norm": self.q_norm is not None, "forget_gate": self.gate_proj is not None}
        options = "".join(f", {name}={value}" for name, value in optional.items() if value)
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}{options}"
        )

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, T, heads·D] → [B, heads, T, D], without a copy."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _normed(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """Normalized in the dtype of the weight, then cast back: under autocast the input is narrower."""
    normed: Tensor = norm(heads.to(norm.weight.dtype))
    return normed.to(heads.dtype)
