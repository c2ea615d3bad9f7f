"""BLOOM: softmax(q·k/√D + m·p_j), where p_j is the position of key j, counted over the visible tokens.

Within softmax that equals −m·|i − j| unless the mask has holes. In bf16 and fp16 the model rounds m·p_j to its own dtype before
adding it (`build_alibi_tensor`), and rounds the scores again; `numerics="checkpoint"` does the same.
Source: modeling_bloom.py of transformers; BLOOM: arXiv:2211.05100, sec. 3.2.
"""

import functools

import torch
from torch import Tensor, nn
from transformers import BloomConfig
from transformers.cache_utils import Cache
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    BloomBlock,
    BloomGelu,
    BloomMLP,
    BloomModel,
    build_alibi_tensor,
    dropout_add,
)

from alibi_attn.attention.kept import Kept
from alibi_attn.hf.attention import patched_attention
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.readers.families.family import PatchedFamily, StepModules
from alibi_attn.slopes import alibi_slopes


def no_bias(mask: Tensor, *_: object, **__: object) -> Tensor:
    """Replaces `BloomModel.build_alibi_tensor`; patched layers build the biases that they need."""
    return mask


def fused_gelu(self: BloomGelu, x: Tensor) -> Tensor:
    """Replaces the five passes over memory of `BloomGelu.forward`, a fifth of a forward pass, with one; same tanh form.

    The error in fp32 is 3e-7 of the largest value, and in bf16 one rounding instead of five. The gradient is that of
    the tanh form.
    """
    return nn.functional.gelu(x, approximate="tanh")


def settings(config: BloomConfig, *, backend: str, numerics: Numerics) -> AttentionSettings:
    """The published slopes, and scores divided by √D."""
    slopes = tuple(alibi_slopes(config.n_head).tolist())
    return AttentionSettings(slopes, (config.hidden_size // config.n_head) ** -0.5, backend, numerics)


def forward(
    self: BloomAttention,
    hidden_states: Tensor,
    residual: Tensor,
    *,
    attention_mask: Tensor,
    layer_past: Cache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces `BloomAttention.forward`."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    mixed = patched_attention.cached_and_attended(
        self,
        query,
        key,
        value,
        cache=layer_past,
        mask=attention_mask,
        dropout_p=self.attention_dropout.p,
        rounded=functools.partial(_rounded, patched_attention.settings_of(self).scale, hidden_states.dtype),
    )
    output: Tensor = self.dense(mixed)
    return dropout_add(output, residual, self.hidden_dropout, self.training), None


def _rounded(
    scale: float, bias_dtype: torch.dtype, query: Tensor, kept: Kept, mask: Tensor, dropout_p: float
) -> Tensor:
    """The eager path of transformers with the same roundings, a few rows at a time."""
    heads, dtype = query.shape[1], query.dtype
    bias = patched_attention.rounded_bias(build_alibi_tensor, mask, heads, kept.key, bias_dtype).flatten(0, 1)
    keys, values = kept.key.flatten(0, 1).mT, kept.value.flatten(0, 1)

    def attend(queries: Tensor, _: Tensor, hidden: Tensor) -> Tensor:
        scores = bias.baddbmm(queries.flatten(0, 1), keys, beta=1.0, alpha=scale).unflatten(0, (-1, heads))
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
        return torch.bmm(nn.functional.dropout(weights, dropout_p).flatten(0, 1), values).unflatten(0, (-1, heads))

    return patched_attention.by_rows(attend, query, kept, mask)


FAMILY = PatchedFamily(
    name="BLOOM",
    model=BloomModel,
    layer=BloomAttention,
    settings=settings,
    forward=forward,
    unused={"build_alibi_tensor": no_bias},
    activations={BloomGelu: fused_gelu},
    step=StepModules(
        embedding="word_embeddings",
        first_norm="word_embeddings_layernorm",
        blocks="h",
        last_norm="ln_f",
        block=BloomBlock,
        attention="self_attention",
        ffn="mlp",
        ffn_kind=BloomMLP,
        norms=("input_layernorm", "post_attention_layernorm"),
        qkv="query_key_value",
        out="dense",
        up="dense_h_to_4h",
        activation="gelu_impl",
        down="dense_4h_to_h",
        activation_kind=BloomGelu,
        by_head=True,
        unsupported=("ffn", "slow_but_exact"),
        residual_after_norm="apply_residual_connection_post_layernorm",
    ),
)
