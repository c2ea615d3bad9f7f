"""replit-code-v1-3b: the MPT of an early llm-foundry, with other names for norms and feed-forward, and a flat config.

replit-code-v1_5-3b is an MPT with grouped heads and has that family's names. Slopes are 2^(−bias_max·(h + 1)/H), which
equals the published rule for a power of two only; the published model has 32 heads. Counts that are not a power of
two raise an error.
Source: weight names of the published checkpoint as read by ggml; early attention.py of llm-foundry.
"""

import dataclasses
from typing import Any

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families import llm_foundry
from alibi_attn.hf.readers.families.family import Checkpoint, Options, Source, decoder_parts

_SAME = ("alibi", "alibi_bias_max", "attn_pdrop", "attn_uses_sequence_id", "prefix_lm", "softmax_scale")
_ATTENTION = {  # our name in attn_config -> Replit's
    **{name: name for name in _SAME},
    "clip_qkv": "attn_clip_qkv",
    "qk_ln": "attn_qk_ln",
}


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Raises ValueError for a number of heads that is not a power of two, and like `llm_foundry.config`."""
    values, where = checkpoint.about.values, checkpoint.about.where
    heads = checkpoint.about.integer("n_heads")
    if heads < 1 or heads & (heads - 1):
        raise ValueError(
            f"{where} has n_heads = {heads} but only powers of two are supported: others have other slopes"
        )
    translated: dict[str, Any] = {
        **values,
        "attn_config": {ours: values[theirs] for ours, theirs in _ATTENTION.items() if theirs in values},
        "expansion_ratio": values.get("mlp_ratio", 4),
    }
    return llm_foundry.config(dataclasses.replace(checkpoint, about=Options(translated, where)))


_PARTS = decoder_parts("ln_1", "attn.Wqkv", "attn.out_proj", "ln_2", "", "mlp.mlp_up", "mlp.mlp_down")

FAMILY = dataclasses.replace(
    llm_foundry.FAMILY,
    name="Replit",
    model_types=("replit_lm", "mpt"),
    marks=("mlp.mlp_up.weight",),
    outside={"embed_tokens": Source(("transformer.wte",)), "norm": Source(("transformer.ln_f",))},
    parts=lambda _: _PARTS,
    config=config,
)
