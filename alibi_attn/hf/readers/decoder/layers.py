"""The layers of the decoder: pre-norm blocks of attention with ALiBi and a feed-forward. Read next: `rounding.py`."""

from typing import cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from alibi_attn.attention.call.checks import default_tolerance
from alibi_attn.attention.call.validation import slopes_beside
from alibi_attn.attention.kept import Kept
from alibi_attn.hf.attention import patched_attention
from alibi_attn.hf.attention.masks import keys_of
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.readers.decoder import forgetting, rounding
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache.retention import by_gates
from alibi_attn.nn.linear.fastest import RoundedLinear, mapped

NEEDS_LENGTH = (
    "the bias of this model (alibi_scaling with train_seq_len, or root_bias) needs the length of the text, which a static cache "
    "does not report; use an ALiBiCache or a DynamicCache"
)


class Block(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """One layer, x [B, T, E] -> [B, T, E]; `mask` comes from `masks.of_layers`."""

    def __init__(self, config: ALiBiCausalLMConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm(config, config.hidden_size)
        self.attention = Attention(config, layer)
        self.ffn_norm = norm(config, config.hidden_size)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x: Tensor, mask: Tensor, *, past_key_values: Cache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, past_key_values))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Attention(nn.Module):
    """Attention with the `alibi_settings` of a patched layer, computed by `patched_attention.attended`."""

    def __init__(self, config: ALiBiCausalLMConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.heads = (config.num_attention_heads, config.key_heads, config.key_heads)
        self.sizes = tuple(heads * config.head_dim for heads in self.heads)
        self.alibi_settings = AttentionSettings(
            config.slopes_at(0), config.scale(layer), config.backend, cast("Numerics", config.numerics)
        )
        maps = linear_class(config)
        self.qkv_proj = maps(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        self.q_norm, self.k_norm = (_qk_norm(config, heads) for heads in self.heads[:2])
        self.forget_proj = maps(config.hidden_size, config.num_attention_heads) if config.forget_gate else None
        self.key_shift, self.value_shift = (
            forgetting.Shift(maps(config.hidden_size, config.key_heads, bias=False)) if is_shifted else None
            for is_shifted in (config.key_shift, config.value_shift)
        )
        self.output_norm = (
            forgetting.HeadNorm(self.heads[0], config.hidden_size, config.norm_eps) if config.output_norm else None
        )
        self.gate_proj = maps(config.hidden_size, config.hidden_size, bias=False) if config.output_gate else None
        self.out_proj = maps(config.hidden_size, config.hidden_size, bias=config.output_bias)

    def forward(self, x: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        qkv: Tensor = mapped(self.qkv_proj, x)
        if (limit := self.config.clip_qkv) is not None:
            qkv = qkv.clamp(-limit, limit)
        query, key, value = qkv.split(self.sizes, dim=-1)
        unshifted: tuple[Tensor, ...] = ()
        if self.config.key_shift or self.config.value_shift:
            unshifted = (key, value)
            key, value = self._shifted(x, key, value, mask=mask, cache=cache)
        parts = zip((self.q_norm(query), self.k_norm(key), value), self.heads, strict=True)
        query, key, value = (patched_attention.by_head(part, heads) for part, heads in parts)
        if unshifted and cache is not None:
            more = (patched_attention.by_head(part, self.heads[1]) for part in unshifted)
            key, value = (torch.cat(pair, dim=1) for pair in zip((key, value), more, strict=True))
        mixed = self._mixed(x, query, key, value, mask=mask, cache=cache)
        if self.output_norm is not None:
            mixed = self.output_norm(mixed)
        if self.gate_proj is not None:
            mixed = mixed * mapped(self.gate_proj, x).sigmoid()
        return mapped(self.out_proj, mixed)

    def _shifted(
        self, x: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, K·D] after their shifts."""
        heads, past = self.heads[1], 0 if cache is None else cache.get_seq_length(self.layer_idx)
        last = forgetting.last_unshifted(cache, self.layer_idx, heads)
        follows = forgetting.follows(mask, past, x.shape[1])
        shifts = (self.key_shift, self.value_shift)
        key, value = (
            y if one is None else one(x, y.unflatten(-1, (heads, -1)), before, follows).flatten(2)
            for y, one, before in zip((key, value), shifts, last, strict=True)
        )
        return key, value

    def _mixed(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, cache: Cache | None
    ) -> Tensor:
        """[B, T, H·D], appended to the cache."""
        if self.forget_proj is not None:
            gates = forgetting.log_gates(mapped(self.forget_proj, x))
            return forgetting.attended(self, query, key, value, gates, cache=cache, mask=mask)
        kept = patched_attention.appended(cache, self, key, value)
        first = kept[0].first
        if self.config.needs_length and isinstance(first, Tensor):
            raise ValueError(NEEDS_LENGTH)
        if self.config.root_bias:
            return self._by_root(query, kept, mask)
        key_len = first + query.shape[2] if isinstance(first, int) else 0
        if self.config.rounds:
            return rounding.attended(self, query, kept[0], key_len=key_len, mask=mask)
        slopes = self.config.slopes_at(key_len) if self.config.scales_with_length else None
        return patched_attention.attended(self, query, kept, mask=mask, dropout_p=self.dropout_p, slopes=slopes)

    @property
    def dropout_p(self) -> float:
        """The share of attention weights that are dropped now."""
        return self.config.attention_dropout if self.training else 0.0

    def _by_root(self, query: Tensor, kept: list[Kept], mask: Tensor) -> Tensor:
        """[B, T, H·D] with the bias −m·√(i − j), as a table by distance."""
        settings, length = self.alibi_settings, kept[0].key.shape[2]
        keys = forgetting.checked(keys_of(mask, length), "a bias by the root of distances")
        slopes = slopes_beside(settings.slopes, torch.promote_types(query.dtype, torch.float32), query)
        distances = torch.arange(length, dtype=slopes.dtype, device=slopes.device)
        mixed = patched_attention.attention_of(self)(
            query,
            kept,
            table=-slopes[:, None] * distances.sqrt(),
            causal=True,
            scale=settings.scale,
            key_mask=keys.seen,
            segment_ids=keys.segments,
            dropout_p=self.dropout_p,
            backend=settings.backend,
        )
        return patched_attention.merged(mixed)

    def reach_cache(self, dtype: torch.dtype, tolerance: float | None) -> KVCache:
        """A cache that drops the keys that forget gates prove unnecessary; the layer needs normalized queries and keys."""
        size = self.config.head_dim
        retention = by_gates(
            self.alibi_settings.slopes,
            score_bound=forgetting.score_bound(self, size),
            tolerance=default_tolerance(dtype) if tolerance is None else tolerance,
            num_kv_heads=self.config.key_heads,
        )
        return KVCache(retention=retention)


class FeedForward(nn.Module):
    """W_down·act(W_up·x), or gated W_down·(act(W_gate·x)·(W_up·x))."""

    def __init__(self, config: ALiBiCausalLMConfig) -> None:
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.ffn_bias
        maps = linear_class(config)
        self.gate_proj = maps(width, hidden, bias=bias) if config.gated else None
        self.up_proj = maps(width, hidden, bias=bias)
        self.down_proj = maps(hidden, width, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        up = mapped(self.up_proj, x)
        hidden: Tensor = self.act(up) if self.gate_proj is None else self.act(mapped(self.gate_proj, x)) * up
        return mapped(self.down_proj, hidden)


class RoundedRMSNorm(nn.RMSNorm):
    """RMS norm that also rounds to the model's dtype before multiplying by the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + cast("float", self.eps))
        return self.weight * wide.to(self.weight.dtype)


def norm(config: ALiBiCausalLMConfig, size: int) -> nn.Module:
    """The norm used throughout the model."""
    if config.norm == "rms":
        return (RoundedRMSNorm if config.rounds else nn.RMSNorm)(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


def _qk_norm(config: ALiBiCausalLMConfig, heads: int) -> nn.Module:
    """The norm of queries or keys, before they are split into heads."""
    size = heads * config.head_dim
    if config.head_norm_eps is not None:
        return forgetting.HeadNorm(heads, size, config.head_norm_eps)
    return norm(config, size) if config.qk_norm else nn.Identity()


def linear_class(config: ALiBiCausalLMConfig) -> type[nn.Linear]:
    """The class of linear layers: torch's, or with numerics="checkpoint" one that rounds like the original on every CPU."""
    return nn.Linear if config.numerics == "exact" else RoundedLinear
