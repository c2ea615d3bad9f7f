"""ALiBi in JAX: `alibi_attention` for arrays, and modules for Flax. Nothing here imports PyTorch.

    from alibi_attn.jax import alibi_attention                  # [B, T, H, D], pure, jit, grad, vmap, shard_map
    from alibi_attn.jax import forgetting_attention             # the same with forget gates
    from alibi_attn.jax import explain                          # which backend runs a call, and how far each head attends
    from alibi_attn.jax import alibi_dot_product_attention      # attention_fn for Flax's own modules, Linen and NNX
    from alibi_attn.jax.flax import ALiBiAttention              # modules for NNX

Read `attention.py` first.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError('alibi_attn.jax needs JAX; install it with: pip install ".[jax]" in a clone') from error

from typing import TYPE_CHECKING

from alibi_attn.lazy import lazy_names

if TYPE_CHECKING:
    from alibi_attn.jax.attention import alibi_attention
    from alibi_attn.jax.explanation import explain
    from alibi_attn.jax.forgetting import forgetting_attention
    from alibi_attn.jax.multihead import alibi_dot_product_attention, mha_alibi

__all__ = ["alibi_attention", "alibi_dot_product_attention", "explain", "forgetting_attention", "mha_alibi"]

_HOMES = {
    "alibi_attn.jax.attention": ("alibi_attention",),
    "alibi_attn.jax.explanation": ("explain",),
    "alibi_attn.jax.forgetting": ("forgetting_attention",),
    "alibi_attn.jax.multihead": ("alibi_dot_product_attention", "mha_alibi"),
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("flax", "Flax", "jax"))
