"""ALiBi for Flax's own attention layers: an `attention_fn`, and a function that applies one.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=alibi_dot_product_attention)
    flax.nnx.MultiHeadAttention(num_heads=8, in_features=64, attention_fn=alibi_dot_product_attention, rngs=rngs)

Press et al. 2022, sec. 3 (arXiv:2108.12409).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.typing import Dtype, PrecisionLike

from alibi_attn.jax.attention import alibi_attention
from alibi_attn.jax.call.plan import Array
from alibi_attn.jax.call.validation import Slopes, checked_dropout_key, make_spec
from alibi_attn.slopes import alibi_slopes


def alibi_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: linen.Module | nnx.Module | None = None,
    *,
    slopes: Slopes | None = None,
    causal: bool = False,
    is_causal: bool = False,
    query_offset: int | Array | None = None,
) -> Array:
    """`flax.linen.dot_product_attention` with bias[h, i, j] = −slopes[h]·|i − j|, [batch..., T, H, D].

    Without a mask, or with one that hides keys from all queries alike, [batch..., 1, 1, S], it is `alibi_attention`: no
    n×n array is built, and time is linear beyond the reach. Any other mask, a bias, or `sow_weights` materializes
    all weights; for causal attention pass `causal=True` (with `functools.partial`) instead of a mask.

    Args:
        query: [batch..., T, H, D], any number of batch axes, including none.
        key, value: [batch..., S, K, D], K divides H.
        bias: [batch..., H, T, S], added to the scores too.
        mask: [batch..., H or 1, T or 1, S], True = visible. A query that sees no key returns zeros.
        broadcast_dropout: whether sequences and heads share the dropped weights, if all weights are materialized.
        module: the module in which Flax sows the weights (`sow_weights=True`).
        slopes: m, one per head; default `alibi_slopes(H)`.
        causal, is_causal: if either is True, the keys to the right are hidden.
        query_offset: position of query 0; by default the queries are the last T of the S positions (as everywhere here), and
            a single query is at the position of its last visible key, as Flax's `decode=True` requires. For cross attention
            between sequences that both begin at 0, pass 0.

    >>> layer = linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=alibi_dot_product_attention)
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)))[0].shape
    (2, 10, 64)

    Source: Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value have shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} but must be "
            "[batch..., T, H, D], [batch..., S, K, D] and the same"
        )
    shape = query.shape
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    dropout_rate = 0.0 if deterministic else dropout_rate
    bias, mask = (None if x is None else _flat(x, shape[:-3]) for x in (bias, mask))
    key_mask = None
    if mask is not None and mask.shape[1:3] == (1, 1):  # its shape shows that it is the same for all heads and queries
        key_mask = jnp.broadcast_to(mask[:, 0, 0] != 0, (len(query), key.shape[1]))
    if query_offset is None and shape[-3] == 1 and key_mask is not None:
        last = key_mask.shape[1] - 1 - jnp.argmax(key_mask[:, ::-1], axis=1)
        query_offset = last.astype(jnp.int32)
    if (mask is None or key_mask is not None) and bias is None and module is None:
        output = alibi_attention(
            query,
            key,
            value,
            slopes,
            causal=causal or is_causal,
            query_offset=query_offset,
            key_mask=key_mask,
            dropout_p=dropout_rate,
            dropout_key=dropout_rng,
        )
        assert isinstance(output, jax.Array)  # no lse was requested
        return output.reshape(shape)
    spec = make_spec(query, key, value, slopes, dropout_p=dropout_rate)
    weights = _weights(query, key, spec.slopes, bias, mask, causal=causal or is_causal, query_offset=query_offset)
    sown = weights.astype(dtype).reshape(*shape[:-3], *weights.shape[1:])
    if isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", sown)
    elif module is not None:
        module.sow(nnx.Intermediate, "attention_weights", sown)
    dropout_key = checked_dropout_key(dropout_rate, dropout_rng)
    if dropout_key is not None:
        dropped = (1, 1, *weights.shape[2:]) if broadcast_dropout else weights.shape
        weights = weights * jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, dropped) / (1.0 - dropout_rate)
    of_heads = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(dtype), of_heads, precision=precision).reshape(shape)


def mha_alibi(seed: int, x: Array, num_heads: int, qkv_features: int) -> Array:
    """Multi-head self-attention of x [T, D_in] with a symmetric ALiBi bias and fresh Flax parameters, flattened to [T·D_in].

    bias[h, i, j] = −m_h·|i − j|,  m_h = 2^(−8(h + 1)/H)

    Args:
        seed: of `jax.random.PRNGKey`, for the parameters.
        qkv_features: width of queries, keys and values together; a multiple of `num_heads`.

    >>> mha_alibi(0, jnp.ones((4, 8)), 2, 8).shape
    (32,)

    Source: the slopes are the geometric sequence of Press et al. 2022, sec. 3 (arXiv:2108.12409), for any H.
    """
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)} but must be [T, D_in]")
    attention_fn = partial(alibi_dot_product_attention, slopes=alibi_slopes(num_heads, rule="formula"))
    layer = linen.MultiHeadDotProductAttention(num_heads, qkv_features=qkv_features, attention_fn=attention_fn)
    parameters = layer.init(jax.random.PRNGKey(seed), x)
    output = layer.apply(parameters, x)
    assert isinstance(output, jax.Array)
    return output.ravel()


def _weights(
    query: Array,
    key: Array,
    slopes: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    causal: bool,
    query_offset: int | Array | None,
) -> Array:
    """[B, H, T, S] in fp32 or better: all weights, zeros for a query that sees no key."""
    heads, query_len, key_len = query.shape[2], query.shape[1], key.shape[1]
    work = jnp.promote_types(query.dtype, jnp.float32)
    of_heads = jnp.repeat(key, heads // key.shape[2], axis=2).astype(work)
    scores = jnp.einsum("bthd,bshd->bhts", query.astype(work), of_heads, precision="highest") * query.shape[3] ** -0.5
    first = key_len - query_len if query_offset is None else query_offset
    i = jnp.reshape(jnp.asarray(first), (-1, 1, 1)) + jnp.arange(query_len)[:, None]
    distance = (i - jnp.arange(key_len))[:, None]
    scores = scores - slopes.reshape(-1, heads, 1, 1) * jnp.abs(distance)
    scores = scores if bias is None else scores + bias
    seen = (distance >= 0) if causal else jnp.ones_like(distance, dtype=bool)
    seen = seen if mask is None else seen & (mask != 0)
    any_seen = seen.any(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.where(any_seen, -jnp.inf, 0.0)), axis=-1)
    return jnp.where(any_seen, weights, 0.0)


def _flat(x: Array, batch: tuple[int, ...]) -> Array:
    """[batch..., H or 1, T or 1, S] -> [B, H or 1, T or 1, S], if batch axes are missing or 1."""
    x = jnp.asarray(x)
    inner = (1,) * max(0, 3 - x.ndim) + x.shape[-3:]
    return jnp.broadcast_to(x, (*batch, *inner)).reshape(math.prod(batch), *inner)
