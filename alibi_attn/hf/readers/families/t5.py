"""T5, mT5 and UMT5, encoders and decoders; FLAN-T5 is a T5. Scores are q·k + t[h, bucket of (i − j)], not divided by √D.

In T5 and mT5 the first layer of a stack has the bias of all layers; in UMT5 each layer has its own.
Source: modeling_t5.py of transformers; Raffel et al. 2020, sec. 2.1 (arXiv:1910.10683).
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5Stack

from alibi_attn.hf.attention import bucketed
from alibi_attn.hf.readers.families.family import PatchedFamily


def forward(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Cache | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None, None]:
    """Replaces `T5Attention.forward`; `position_bias` is a table by head and distance."""
    mixed, table = bucketed.attended(self, hidden_states, key_value_states, mask, position_bias, past_key_values)
    return self.o(mixed), table, None


def umt5_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Cache | None = None,
    *,
    attention_mask: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces `UMT5Attention.forward`."""
    mixed, _table = bucketed.attended(self, hidden_states, encoder_hidden_states, attention_mask, None, past_key_values)
    return self.o(mixed), None


FAMILIES = tuple(
    PatchedFamily(
        name=name,
        model=stack,
        layer=layer,
        settings=bucketed.settings,
        forward=replacement,
        mark="table_settings",
        around=bucketed.stack_forward,
    )
    for name, stack, layer, replacement in (
        ("T5", T5Stack, T5Attention, forward),
        ("mT5", MT5Stack, MT5Attention, forward),
        ("UMT5", UMT5Stack, UMT5Attention, umt5_forward),
    )
)
