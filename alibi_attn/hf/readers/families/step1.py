"""Step-1, the language model of Step-Audio: Llama's layers and names, shared key heads, and √-ALiBi, −m·√(i − j).

Slopes are the published ones. The bias of far keys falls ever more slowly, but Σ exp(−m·√d) converges, so they are skipped all
the same (`toeplitz_attention`). The original rounds the bias to the model's dtype, this reader computes it in fp32. Only the
model_type tells its checkpoints from Llama's. Sources: modeling_step1.py of Step-Audio; step1.py of vLLM.
"""

import dataclasses

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families import baichuan
from alibi_attn.hf.readers.families.family import SIZES, Checkpoint, Source


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """A head in the checkpoint is loaded, unless its config says that it is tied."""
    about = checkpoint.about
    biased = about.flag("attention_bias", False)
    return ALiBiCausalLMConfig(
        **about.shared(*SIZES),
        num_key_value_heads=about.integer("num_attention_groups"),
        intermediate_size=about.integer("intermediate_size"),
        norm_eps=about.number("rms_norm_eps", 1e-5),
        attention_bias=biased,
        output_bias=biased,
        ffn_bias=about.flag("mlp_bias", False),
        root_bias=True,
        tie_word_embeddings=about.flag("tie_word_embeddings", "lm_head.weight" not in checkpoint.tensors),
        trained_length=about.integer("max_seq_len", 4096),
    )


_QKV = Source(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
_PARTS = {**baichuan.PARTS, "attention.qkv_proj": _QKV}

FAMILY = dataclasses.replace(
    baichuan.FAMILY,
    name="Step-1",
    model_types=("step1",),
    is_typed=True,
    marks=("self_attn.q_proj.weight",),
    parts=lambda _: _PARTS,
    ignored="(?!)",
    classes=("step1",),
    config=config,
)
