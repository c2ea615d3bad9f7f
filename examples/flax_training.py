"""How do you train a model with ALiBi in JAX, and does it work beyond the trained length?

python examples/flax_training.py       # 150 steps; pass another number
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

from alibi_attn.jax.flax import ALiBiTransformerBlock

VOCABULARY = 16


class LanguageModel(nnx.Module):
    """Tokens [B, T] → scores of the next token [B, T, VOCABULARY]."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.block = ALiBiTransformerBlock(width, num_heads, rngs=rngs)  # as many as you like

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embedding.attend(self.block(self.embedding(tokens)))


def text(random: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Synthetic text: each token is the sum of the two before it modulo 16, so order matters."""
    tokens = random.integers(VOCABULARY, size=(batch, length))
    for at in range(2, length):
        tokens[:, at] = tokens[:, at - 2 : at].sum(1) % VOCABULARY
    return tokens


def loss(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Mean loss, in nats, of the predictable tokens: all but the first two."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1])[:, 1:], tokens[:, 2:]).mean()


@nnx.jit
def step(model: LanguageModel, optimizer: nnx.Optimizer, tokens: jax.Array) -> None:
    optimizer.update(model, nnx.grad(loss)(model, tokens))


def main(steps: int = 150) -> None:
    random = np.random.default_rng(0)
    model = LanguageModel(32, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for _ in range(steps):
        step(model, optimizer, text(random, 32, 32))
    for length in (32, 256):
        print(f"trained at 32 tokens, tested at {length}: {nnx.jit(loss)(model, text(random, 16, length)):.2f} nats")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
