"""ALiBi modules for Flax Linen: an attention layer and a transformer block, with a cache. The twins of `flax.py`.

Parameters have the names of PyTorch's: `converted_weights` turns a state dict into parameters, and back.
Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import jax
import jax.numpy as jnp

try:
    from flax import linen
    from flax.typing import Dtype
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError('alibi_attn.jax.linen needs Flax; install it with: pip install "alibi-attn[jax]"') from error

from alibi_attn.jax.layers import (
    GATE_INITIALIZER,
    LAYER_NORM_EPS,
    QK_NORM_EPS,
    appended,
    at_least_fp32,
    attended,
    check_input,
    check_sizes,
    checked_slopes,
    converted_weights,
    log_gates,
)
from alibi_attn.jax.tiles import Array

__all__ = ["ALiBiAttention", "ALiBiTransformerBlock", "converted_weights"]


class ALiBiAttention(linen.Module):
    """Self-attention with linear biases: x [B, T, embed_dim] -> [B, T, embed_dim].

        softmax(q·kᵀ/√D − m·|i − j|)·v,   q, k, v = linear maps of x, one fixed slope m per head

    Args:
        decode: keep keys and values in the collection "cache". `init` makes room for as many positions as its x is long;
            every later call appends x (any length) to what is there, and needs `mutable=["cache"]`.
        num_kv_heads, bias, causal, window, dropout_p, slopes, learn_slopes, qk_norm, forget_gate, dtype: as
            `flax.ALiBiAttention`.

    >>> attention = ALiBiAttention(embed_dim=64, num_heads=8)
    >>> attention.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)))[0].shape
    (2, 10, 64)

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    bias: bool = False
    causal: bool = True
    window: int | None = None
    dropout_p: float = 0.0
    slopes: tuple[float, ...] | None = None
    learn_slopes: bool = False
    qk_norm: bool = False
    forget_gate: bool = False
    decode: bool = False
    dtype: Dtype | None = None

    @linen.compact
    def __call__(
        self,
        x: Array,
        *,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Attend from x to x, and to what the cache holds.

        Args:
            x: [B, T, embed_dim].
            key_mask: [B, S] bool, True = may be seen; while decoding S is the room of the cache.
            segment_ids: [B, S] integers, the same S: attend within a segment only.
            deterministic: no dropout; otherwise pass `rngs={"dropout": key}`.
        """
        check_input(x, self.embed_dim)
        num_kv_heads = check_sizes(
            self.embed_dim, self.num_heads, self.num_kv_heads, self.dropout_p, causal=self.causal, cached=self.decode,
            forget_gate=self.forget_gate,
        )  # fmt: skip
        head_dim = self.embed_dim // self.num_heads

        def heads(name: str, count: int) -> Array:
            """[B, T, count, D]."""
            projected = self._linear(count * head_dim, name)(x)
            return projected.reshape(*x.shape[:2], count, head_dim)

        query = heads("q_proj", self.num_heads)
        key, value = heads("k_proj", num_kv_heads), heads("v_proj", num_kv_heads)
        if self.qk_norm:
            query = linen.RMSNorm(epsilon=QK_NORM_EPS, dtype=self.dtype, name="q_norm")(query)
            key = linen.RMSNorm(epsilon=QK_NORM_EPS, dtype=self.dtype, name="k_norm")(key)
        gates = self._gates(x) if self.forget_gate else None
        first = None
        if self.decode:
            key, value, gates, first = self._append(key, value, gates)
        values = checked_slopes(self.slopes, self.num_heads)
        drops = self.dropout_p > 0.0 and not deterministic
        mixed = attended(
            query,
            key,
            value,
            self.param("slopes", lambda _: jnp.asarray(values, jnp.float32)) if self.learn_slopes else values,
            gates,
            causal=self.causal,
            window=self.window,
            query_offset=first,
            key_mask=key_mask,
            segment_ids=segment_ids,
            dropout_p=self.dropout_p if drops else 0.0,
            dropout_key=self.make_rng("dropout") if drops else None,
        )
        output: Array = self._linear(self.embed_dim, "out_proj")(mixed)
        return output

    def _linear(self, features: int, name: str) -> linen.Dense:
        return linen.Dense(features, use_bias=self.bias, dtype=self.dtype, name=name)

    def _gates(self, x: Array) -> Array:
        """ln of the forget gates [B, H, T], in fp32 or better."""
        gate_proj = linen.Dense(
            self.num_heads, kernel_init=GATE_INITIALIZER, precision=jax.lax.Precision.HIGHEST, name="gate_proj"
        )
        return log_gates(gate_proj(at_least_fp32(x)))

    def _append(self, key: Array, value: Array, gates: Array | None) -> tuple[Array, Array, Array | None, Array | None]:
        """(all keys, values and gates, position of the first new one); while the room is made, only what came."""
        is_there = self.has_variable("cache", "key")
        keys = self.variable("cache", "key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "value", jnp.zeros, value.shape, value.dtype)
        length = self.variable("cache", "length", lambda: jnp.zeros((), jnp.int32))
        kept = None if gates is None else self.variable("cache", "log_fgate", jnp.zeros, gates.shape, gates.dtype)
        if not is_there:
            return key, value, gates, None
        first = length.value
        keys.value, values.value = appended(keys.value, key, first), appended(values.value, value, first)
        if kept is not None and gates is not None:
            kept.value = gates = appended(kept.value, gates, first, axis=2)
        length.value = first + key.shape[1]
        return keys.value, values.value, gates, first


class ALiBiTransformerBlock(linen.Module):
    """One pre-norm transformer block, x [B, T, embed_dim] -> [B, T, embed_dim].

        x ← x + dropout(attention(norm(x)))
        x ← x + dropout(W₂·dropout(GELU(W₁·norm(x))))

    Args:
        ffn_dim: width of the feed-forward network; default 4·embed_dim.
        dropout_p: of attention weights, activations and both branches, unless `deterministic`.
        bias: of all linear maps and norms.

    >>> block = ALiBiTransformerBlock(embed_dim=64, num_heads=8, num_kv_heads=2)
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)))[0].shape
    (2, 10, 64)

    Source: pre-norm blocks: Baevski & Auli 2019 (arXiv:1809.10853), the model of Press et al. 2022.
    """

    embed_dim: int
    num_heads: int
    ffn_dim: int | None = None
    num_kv_heads: int | None = None
    bias: bool = False
    causal: bool = True
    window: int | None = None
    dropout_p: float = 0.0
    slopes: tuple[float, ...] | None = None
    learn_slopes: bool = False
    qk_norm: bool = False
    forget_gate: bool = False
    decode: bool = False
    dtype: Dtype | None = None

    @linen.compact
    def __call__(
        self,
        x: Array,
        *,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """As `ALiBiAttention.__call__`."""
        dropout = linen.Dropout(self.dropout_p, deterministic=deterministic)
        attention = ALiBiAttention(
            self.embed_dim, self.num_heads, num_kv_heads=self.num_kv_heads, bias=self.bias, causal=self.causal,
            window=self.window, dropout_p=self.dropout_p, slopes=self.slopes, learn_slopes=self.learn_slopes,
            qk_norm=self.qk_norm, forget_gate=self.forget_gate, decode=self.decode, dtype=self.dtype, name="attention",
        )  # fmt: skip
        attended = attention(
            self._norm("attention_norm")(x),
            key_mask=key_mask,
            segment_ids=segment_ids,
            deterministic=deterministic,
        )
        x = x + dropout(attended)
        ffn_dim = 4 * self.embed_dim if self.ffn_dim is None else self.ffn_dim
        widen = linen.Dense(ffn_dim, use_bias=self.bias, dtype=self.dtype, name="ffn_in")
        narrow = linen.Dense(self.embed_dim, use_bias=self.bias, dtype=self.dtype, name="ffn_out")
        hidden = dropout(linen.gelu(widen(self._norm("ffn_norm")(x)), approximate=False))
        output: Array = x + dropout(narrow(hidden))
        return output

    def _norm(self, name: str) -> linen.LayerNorm:
        return linen.LayerNorm(
            epsilon=LAYER_NORM_EPS, use_bias=self.bias, use_fast_variance=False, dtype=self.dtype, name=name
        )
