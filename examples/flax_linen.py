"""How does a Linen model use ALiBi, and does decoding with a cache equal one full pass?

python examples/flax_linen.py
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen

from alibi_attn.jax import alibi_dot_product_attention


class Block(linen.Module):
    """One pre-norm transformer block of Flax's own layers, [B, T, width] -> [B, T, width]."""

    num_heads: int
    decode: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = linen.MultiHeadDotProductAttention(
            self.num_heads, attention_fn=partial(alibi_dot_product_attention, causal=True), decode=self.decode
        )
        x = x + attention(linen.LayerNorm()(x))
        hidden = linen.gelu(linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1])(hidden)


def main(length: int = 24) -> None:
    x = jax.random.normal(jax.random.key(0), (1, length, 32))
    decoder = Block(num_heads=8, decode=True)
    parameters, cache = (decoder.init(jax.random.key(1), x)[name] for name in ("params", "cache"))
    full = Block(num_heads=8).apply({"params": parameters}, x)
    step = jax.jit(partial(decoder.apply, mutable="cache"))
    tokens = []
    for at in range(length):
        token, changed = step({"params": parameters, "cache": cache}, x[:, at : at + 1])
        cache = changed["cache"]
        tokens.append(token)
    difference = jnp.abs(jnp.concatenate(tokens, axis=1) - full).max()
    print(f"{length} tokens, one at a time, differ from one full pass by {difference:.1e}")


if __name__ == "__main__":
    main()
