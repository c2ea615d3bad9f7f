"""Falcon with alibi=True (Falcon-RW): softmax((q·k + m·p_j)/√D). The bias is scaled too, so the slope is m/√D.

Positions p_j are counted over the visible tokens. The sdpa path of transformers 5.23 computes this formula; its eager path adds
the bias twice. In every dtype the model rounds m, and then m·p_j, to bf16 (inexact beyond 256 positions even in fp32);
`numerics="checkpoint"` does the same. Source: modeling_falcon.py of transformers.
"""

import functools
import math

import torch
from torch import Tensor, nn
from transformers import FalconConfig
from transformers.cache_utils import Cache
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconLinear, FalconModel, build_alibi_tensor

from alibi_attn.attention.kept import Kept
from alibi_attn.hf.attention import patched_attention
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.readers.families.family import PatchedFamily
from alibi_attn.slopes import alibi_slopes


def why_not(config: FalconConfig) -> str | None:
    """Why it cannot be patched, or None: most Falcons have rotary positions instead of ALiBi."""
    return None if config.alibi else "its config has alibi=False: it uses rotary positions instead of ALiBi"


def settings(config: FalconConfig, *, backend: str, numerics: Numerics) -> AttentionSettings:
    """The published slopes divided by √D, and scores divided by √D."""
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5
    slopes = tuple((alibi_slopes(config.num_attention_heads) * scale).tolist())
    return AttentionSettings(slopes, scale, backend, numerics)


def forward(
    self: FalconAttention,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    layer_past: Cache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces `FalconAttention.forward`."""
    split = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in split)
    mixed = patched_attention.cached_and_attended(
        self,
        query,
        key,
        value,
        cache=layer_past,
        mask=attention_mask,
        dropout_p=self.attention_dropout.p,
        rounded=functools.partial(_rounded, hidden_states.dtype),
    )
    return self.dense(mixed), None


def _rounded(bias_dtype: torch.dtype, query: Tensor, kept: Kept, mask: Tensor, dropout_p: float) -> Tensor:
    """The sdpa path of transformers with the same roundings, a few rows at a time."""
    heads, lowest = query.shape[1], torch.finfo(query.dtype).min
    bias = patched_attention.rounded_bias(build_alibi_tensor, mask, heads, kept.key, bias_dtype)
    bias = bias / math.sqrt(query.shape[3])
    key, value = (x.expand(-1, heads, -1, -1) for x in (kept.key, kept.value))

    def attend(queries: Tensor, _: Tensor, hidden: Tensor) -> Tensor:
        seen = bias.masked_fill(hidden, lowest)
        return nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=seen, dropout_p=dropout_p)

    return patched_attention.by_rows(attend, query, kept, mask)


FAMILY = PatchedFamily(
    name="Falcon with alibi=True",
    model=FalconModel,
    layer=FalconAttention,
    settings=settings,
    forward=forward,
    why_not=why_not,
    unused={"use_alibi": False},
    linears=(nn.Linear, FalconLinear),
    classes=("rwforcausallm", "rwmodel"),
    instead="FalconForCausalLM",
)
