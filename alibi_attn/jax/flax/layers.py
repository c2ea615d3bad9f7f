"""The attention layer, the transformer block and the cache for Flax NNX."""

from collections.abc import Sequence
from functools import partial
from typing import Never, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

try:
    from flax import nnx
    from flax.typing import Dtype
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError('alibi_attn.jax.flax needs Flax; install it with: pip install ".[jax]" in a clone') from error

from alibi_attn.attention.call.hints import by_position, hides_unknown
from alibi_attn.attention.call.options import AttentionOptions, LayerOptions
from alibi_attn.attention.call.query_positions import check_layer
from alibi_attn.jax.attention import alibi_attention
from alibi_attn.jax.call.plan import Array
from alibi_attn.jax.call.validation import Slopes, checked_dropout_key, make_spec, readable_values
from alibi_attn.jax.forgetting import attend_gated
from alibi_attn.slopes import alibi_slopes

QK_NORM_EPS = 1e-6  # as in alibi_attn.nn and torch.nn.LayerNorm
LAYER_NORM_EPS = 1e-5
# As torch.nn.Linear and `alibi_attn.nn` initialize a gate, U(−1/√E, 1/√E); Flax's default is √3 times as wide.
GATE_INITIALIZER = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class FlaxOptions(LayerOptions, total=False):
    """The keyword arguments of `ALiBiAttention`, except its dropout."""

    window: int | Sequence[int] | None
    slopes: Slopes | None
    dtype: Dtype | None


class KVCache(nnx.Module):
    """Keys and values of one attention layer while decoding, [B, capacity, K, D]; `length` of them are filled.

    The capacity is fixed, so that a decoding step is compiled once. It is the only object that a forward pass changes.

    Args:
        num_gates: H for a layer with forget gates, whose gates are in `log_fgate`, [B, H, capacity], in fp32 or better; else 0.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_gates: int = 0,
        dtype: Dtype = jnp.float32,
    ) -> None:
        shape = (batch, capacity, num_kv_heads, head_dim)
        self.key = nnx.Cache(jnp.zeros(shape, dtype))
        self.value = nnx.Cache(jnp.zeros(shape, dtype))
        gates = jnp.zeros((batch, num_gates, capacity), jnp.promote_types(dtype, jnp.float32))
        self.log_fgate = nnx.Cache(gates) if num_gates else None
        self.length = nnx.Cache(jnp.zeros((), jnp.int32))

    def append(self, key: Array, value: Array, *, log_fgate: Array | None = None) -> tuple[Array, Array, Array]:
        """(all keys, all values, position of the first new one) after adding new ones [B, T, K, D], and gates [B, H, T].

        Raises:
            ValueError: gates for a cache without gates, or no gates for one that has them; the cache is of another batch or
                layer; it is full (under `jit`, where no error can be raised, the results are NaN).
        """
        if (log_fgate is None) != (self.log_fgate is None):
            given, has = ("no gates", "has") if log_fgate is None else ("gates", "has no")
            raise ValueError(
                f"{given} were passed but the cache {has} room for gates; make it with the layer's new_cache()"
            )
        first, capacity = self.length[...], self.key[...].shape[1]
        keys, values = _appended(self.key[...], key, first), _appended(self.value[...], value, first)
        if log_fgate is not None and self.log_fgate is not None:
            self.log_fgate[...] = _appended(self.log_fgate[...], log_fgate, first, axis=2)
        self.key[...], self.value[...] = keys, values
        self.length[...] = first + key.shape[1]
        # If the cache is full, every new query is at the position of a NaN, so that it sees one in any window.
        return self.key[...], self.value[...], jnp.minimum(first, capacity - key.shape[1])


class ALiBiAttention(nnx.Module):
    """Self-attention with linear biases: x [B, T, embed_dim] -> [B, T, embed_dim].

        softmax(q·kᵀ/√D − m·|i − j|)·v,   q, k, v = linear maps of x, one fixed slope m per head

    Args:
        embed_dim: a multiple of `num_heads`; the head size is D = embed_dim / num_heads.
        num_kv_heads: K, which divides H: grouped-query attention. Default H.
        bias: whether the linear maps have a bias.
        causal: False for encoders: the bias is symmetric.
        window: how many keys a query may see, including its own; or one number per head, [H].
        sinks: the number of first keys that the window never hides.
        registers: the number of first tokens without a bias, such as a class token (causal=False only).
        dropout_p: dropout of attention weights, unless `deterministic` (which `eval()` sets).
        slopes: [H]; default `alibi_slopes(num_heads)`.
        learn_slopes: make the slopes a parameter.
        qk_norm: RMS-normalize queries and keys per head, with a weight and without an offset.
        forget_gate: the Forgetting Transformer's gates in addition to the slopes (`slopes=[0.0] * H`: gates only); causal only.
            `gate_proj` computes for every head and token the share of the earlier tokens that is kept: the sigmoid of a
            linear map of x. It is initialized as in PyTorch, U(±1/√embed_dim) with a bias of 0, and computed in fp32 or
            better in any `dtype`.
        dtype: dtype of the computation; default: the dtype of x and the parameters.

    Raises:
        ValueError: arguments that do not fit together.

    >>> attention = ALiBiAttention(embed_dim=64, num_heads=8, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 10, 64))).shape
    (2, 10, 64)

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409); gates: Lin et al. 2025 (arXiv:2503.02130).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window: int | Sequence[int] | None = None,
        sinks: int = 0,
        registers: int = 0,
        dropout_p: float = 0.0,
        slopes: Slopes | None = None,
        learn_slopes: bool = False,
        qk_norm: bool = False,
        forget_gate: bool = False,
        dtype: Dtype | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = check_layer(
            embed_dim, num_heads, num_kv_heads, window=window, sinks=sinks, registers=registers, dropout_p=dropout_p,
            causal=causal, forget_gate=forget_gate, values=readable_values,
        )  # fmt: skip
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.sinks, self.registers = causal, sinks, registers
        self.dropout_p, self.deterministic = dropout_p, False
        numbers = np.asarray(alibi_slopes(num_heads) if slopes is None else slopes, np.float64)
        if numbers.shape != (num_heads,):
            raise ValueError(f"slopes has shape {list(numbers.shape)} but must be [H] = [{num_heads}]")
        values = tuple(numbers.tolist())
        self.slopes = nnx.Param(jnp.asarray(values, jnp.float32)) if learn_slopes else values
        key_dim = num_kv_heads * self.head_dim
        self.q_proj = nnx.Linear(embed_dim, embed_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = nnx.Linear(embed_dim, key_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = nnx.Linear(embed_dim, key_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.out_proj = nnx.Linear(embed_dim, embed_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.q_norm = nnx.RMSNorm(self.head_dim, epsilon=QK_NORM_EPS, dtype=dtype, rngs=rngs) if qk_norm else None
        self.k_norm = nnx.RMSNorm(self.head_dim, epsilon=QK_NORM_EPS, dtype=dtype, rngs=rngs) if qk_norm else None
        gate_proj = partial(nnx.Linear, kernel_init=GATE_INITIALIZER, precision=jax.lax.Precision.HIGHEST, rngs=rngs)
        self.gate_proj = gate_proj(embed_dim, num_heads) if forget_gate else None
        self.rngs = rngs.dropout.fork() if dropout_p > 0.0 else None

    @hides_unknown
    def __call__(
        self,
        x: Array,
        *more: Never,
        cache: KVCache | None = None,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        prefix_len: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Attends from x to x and to the cached positions; x is appended to the cache.

        Args:
            x: [B, T, embed_dim]: the positions after those in the cache.
            cache: this layer's cache, from `new_cache`. However a sequence is divided into chunks, the outputs equal
                one full pass.
            key_mask: [B, S] bool, True = visible; with a cache S is its capacity.
            segment_ids: [B, S] integers, the same S: attention stays within a segment.
            prefix_len, positions: as for `alibi_attention`; without a cache and without forget gates.
        """
        if more:
            raise by_position("ALiBiAttention", more)
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x has shape {list(x.shape)} but must be [B, T, embed_dim] = [B, T, {self.embed_dim}]")
        if cache is not None and not self.causal:
            raise ValueError("cache needs causal=True: without it later keys would change outputs already returned")
        if (prefix_len is not None or positions is not None) and (cache is not None or self.gate_proj is not None):
            raise ValueError(
                "prefix_len and positions support neither a cache nor forget gates in Flax; omit one of them"
            )
        query, key, value = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        gates = None if self.gate_proj is None else self._log_gates(self.gate_proj, x)
        first = None
        if cache is not None:
            key, value, first = cache.append(key, value, log_fgate=gates)
            key, value = key.astype(query.dtype), value.astype(query.dtype)
            gates = None if cache.log_fgate is None else cache.log_fgate[...]
        slopes = self.slopes[...] if isinstance(self.slopes, nnx.Param) else self.slopes
        dropout_p, dropout_key = 0.0, None
        if self.rngs is not None and not self.deterministic:
            dropout_p, dropout_key = self.dropout_p, self.rngs()
        options: AttentionOptions[Array] = {
            "causal": self.causal,
            "window": self.window,
            "query_offset": first,
            "key_mask": key_mask,
            "segment_ids": segment_ids,
            "dropout_p": dropout_p,
        }
        if gates is None:
            options |= {
                "sinks": self.sinks,
                "registers": self.registers,
                "prefix_len": prefix_len,
                "positions": positions,
            }
            mixed = alibi_attention(query, key, value, slopes, dropout_key=dropout_key, **options)
            assert isinstance(mixed, jax.Array)  # no lse was requested
        else:  # `forgetting_attention` with an offset that may be traced
            spec = make_spec(query, key, value, slopes, **options)
            dropout_key = checked_dropout_key(dropout_p, dropout_key)
            mixed, _ = attend_gated(spec, query, key, value, gates, 0 if first is None else first, dropout_key)
        output: Array = self.out_proj(mixed.reshape(*mixed.shape[:2], -1))
        return output

    def new_cache(self, batch: int, capacity: int, *, dtype: Dtype = jnp.float32) -> KVCache:
        """An empty cache for this layer, with room for `capacity` positions of `batch` sequences."""
        gates = 0 if self.gate_proj is None else self.num_heads
        return KVCache(batch, capacity, self.num_kv_heads, self.head_dim, num_gates=gates, dtype=dtype)

    def _log_gates(self, gate_proj: nnx.Linear, x: Array) -> Array:
        """ln of the gates [B, H, T], ln sigmoid (Lin et al. 2025, arXiv:2503.02130, eq. 9), in fp32 or better."""
        logits: Array = gate_proj(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return jax.nn.log_sigmoid(logits).swapaxes(1, 2)

    def _heads(self, projected: Array) -> Array:
        """[B, T, heads·D] -> [B, T, heads, D]."""
        return projected.reshape(*projected.shape[:2], -1, self.head_dim)


class ALiBiTransformerBlock(nnx.Module):
    """One pre-norm transformer block, x [B, T, embed_dim] -> [B, T, embed_dim].

        x ← x + dropout(attention(norm(x)))
        x ← x + dropout(W₂·dropout(GELU(W₁·norm(x))))

    Args:
        ffn_dim: width of the feed-forward network; default 4·embed_dim.
        dropout_p: dropout of attention weights, activations and both branches, unless `deterministic`.
        attention: options of `ALiBiAttention`; `bias` applies to all linear maps and norms.

    >>> block = ALiBiTransformerBlock(embed_dim=64, num_heads=8, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> block(jnp.ones((2, 10, 64))).shape
    (2, 10, 64)

    Source: pre-norm blocks: Baevski & Auli 2019 (arXiv:1809.10853), the model of Press et al. 2022.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int | None = None,
        *,
        dropout_p: float = 0.0,
        rngs: nnx.Rngs,
        **attention: Unpack[FlaxOptions],
    ) -> None:
        ffn_dim = 4 * embed_dim if ffn_dim is None else ffn_dim
        bias, dtype = attention.get("bias", False), attention.get("dtype")
        norm = partial(nnx.LayerNorm, epsilon=LAYER_NORM_EPS, use_bias=bias, use_fast_variance=False, dtype=dtype)
        self.attention_norm = norm(embed_dim, rngs=rngs)
        self.attention = ALiBiAttention(embed_dim, num_heads, dropout_p=dropout_p, rngs=rngs, **attention)
        self.ffn_norm = norm(embed_dim, rngs=rngs)
        self.ffn_in = nnx.Linear(embed_dim, ffn_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.ffn_out = nnx.Linear(ffn_dim, embed_dim, use_bias=bias, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_p, rngs=rngs)

    @hides_unknown
    def __call__(
        self,
        x: Array,
        *more: Never,
        cache: KVCache | None = None,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        prefix_len: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Same as `ALiBiAttention.__call__`; the cache belongs to this block's attention layer."""
        if more:
            raise by_position("ALiBiTransformerBlock", more)
        attended = self.attention(
            self.attention_norm(x),
            cache=cache,
            key_mask=key_mask,
            segment_ids=segment_ids,
            prefix_len=prefix_len,
            positions=positions,
        )
        x = x + self.dropout(attended)
        hidden = self.dropout(jax.nn.gelu(self.ffn_in(self.ffn_norm(x)), approximate=False))
        output: Array = x + self.dropout(self.ffn_out(hidden))
        return output


def _appended(cached: Array, new: Array, length: Array, *, axis: int = 1) -> Array:
    """[B, capacity, K, D]: the cache with keys or values [B, T, K, D] added at position `length`; for gates, axis=2.

    Raises:
        ValueError: the shapes differ in another axis, or the cache is full. If the length is traced, a full cache raises no
            error: NaN is appended instead, and every output that sees it is NaN.
    """
    capacity, end = cached.shape[axis], length + new.shape[axis]
    if new.shape != (*cached.shape[:axis], new.shape[axis], *cached.shape[axis + 1 :]):
        raise ValueError(
            f"an array of shape {list(new.shape)} was passed but the cache holds {list(cached.shape)}: only the length, axis "
            f"{axis}, may differ; make the cache with the layer's new_cache()"
        )
    if not isinstance(length, jax.core.Tracer) and int(end) > capacity:
        raise ValueError(
            f"the cache holds {int(length)} of {capacity} positions and {new.shape[axis]} more do not fit; make a larger one"
        )
    new = jnp.where(end > capacity, jnp.nan, new.astype(cached.dtype))
    return lax.dynamic_update_slice_in_dim(cached, new, length, axis=axis)
