"""BLOOM: softmax(q·k/√D + m·p_j), where p_j is the position of key j, counted over the visible tokens.

Within softmax that equals −m·|i − j| unless the mask has holes. In bf16 and fp16 the model rounds m·p_j to its own dtype before
adding it (`build_alibi_tensor`), and rounds the scores again; `numerics="checkpoint"` does the same.
Source: modeling_bloom.py of transformers; BLOOM: arXiv:2211.05100, sec. 3.2.
"""

import torch
from torch import Tensor, nn
from transformers import BloomConfig
from transformers.cache_utils import Cache
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    BloomGelu,
    BloomModel,
    build_alibi_tensor,
    dropout_add,
)

from alibi_attn.hf import patched_attention
from alibi_attn.hf.families.family import PatchedFamily
from alibi_attn.hf.patched_attention import AttentionSettings, Numerics
from alibi_attn.slopes import alibi_slopes


def no_bias(mask: Tensor, *_: object, **__: object) -> Tensor:
    """Replaces `BloomModel.build_alibi_tensor`; patched layers build the biases that they need."""
    return mask


def fused_gelu(self: BloomGelu, x: Tensor) -> Tensor:
    """Replaces `BloomGelu.forward`, whose five passes over memory take a fifth of a forward pass, with one pass; same tanh form.

    The error in fp32 is 3e-7 of the largest value, and in bf16 one rounding instead of five. The gradient is that of this form.
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
    alibi: Tensor,
    attention_mask: Tensor,
    layer_past: Cache | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces `BloomAttention.forward`."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    key, value, first = patched_attention.extended(self, layer_past, key, value)
    dropout_p = float(self.attention_dropout.p) if self.training else 0.0
    if patched_attention.of(self).numerics == "checkpoint":
        bias = patched_attention.rounded_bias(build_alibi_tensor, attention_mask, key, hidden_states.dtype)
        mixed = _rounded(self, query, key, value, bias, first, attention_mask, dropout_p)
    else:
        mixed = patched_attention.attended(
            self, query, key, value, cache=layer_past, first=first, mask=attention_mask, dropout_p=dropout_p
        )
    output: Tensor = self.dense(mixed)
    return dropout_add(output, residual, self.hidden_dropout, self.training), None


def _rounded(
    layer: BloomAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    first: int | Tensor,
    mask: Tensor,
    dropout_p: float,
) -> Tensor:
    """The eager path of transformers with the same roundings, a few rows at a time."""
    batch, heads, query_len, head_dim = query.shape
    key_len, lowest = key.shape[2], torch.finfo(query.dtype).min
    bias = bias.view(batch * heads, 1, key_len)
    keys = key.reshape(batch * heads, key_len, head_dim).transpose(1, 2)
    values = value.reshape(batch * heads, key_len, head_dim)
    outputs = []
    for rows, hidden in patched_attention.row_blocks(query_len, key_len, first, mask, query.device):
        queries = query[:, :, rows].reshape(batch * heads, -1, head_dim)
        scores = bias.baddbmm(queries, keys, beta=1.0, alpha=patched_attention.of(layer).scale)
        scores = scores.view(batch, heads, -1, key_len).masked_fill(hidden, lowest)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        weights = nn.functional.dropout(weights, dropout_p)
        outputs.append(torch.bmm(weights.flatten(0, 1), values).view(batch, heads, -1, head_dim))
    return patched_attention.merged(torch.cat(outputs, dim=2))


FAMILY = PatchedFamily(
    name="BLOOM",
    model=BloomModel,
    layer=BloomAttention,
    settings=settings,
    forward=forward,
    unused={"build_alibi_tensor": no_bias},
    activations={BloomGelu: fused_gelu},
)
