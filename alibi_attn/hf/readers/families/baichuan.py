"""Baichuan-13B and Baichuan2-13B: RMS norms, SwiGLU, W_pack [3E, E] (q, k, v), no biases, published slopes, scores over √D.

Both have the same layout. Baichuan2 divides each row of its head by its length, and only the vocabulary size
distinguishes the two. The 7B models have the same layout too, but use rotary positions: loading one raises an error.
With numerics="checkpoint" biases are m·j in the model's dtype, as in the originals at inference.
Sources: modeling_baichuan.py of both; Baichuan 2: arXiv:2309.10305.
"""

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import SIZES, Checkpoint, Family, Source, decoder_parts

VOCABULARIES = {64000: False, 125696: True}  # of the published models: whether the head is normalized
ROTARY_WIDTH = 4096  # of the 7B models


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Raises ValueError for a 7B model, and if the vocabulary does not identify the version."""
    about = checkpoint.about
    if about.has("max_position_embeddings") or about.integer("hidden_size") == ROTARY_WIDTH:
        raise ValueError(
            f"{checkpoint.folder} is a 7B Baichuan, with rotary positions instead of ALiBi; use a 13B model"
        )
    sizes = about.shared(*SIZES)
    vocabulary = sizes["vocab_size"]
    normalized = checkpoint.changes.get("normalized_head")
    if normalized is None:
        if vocabulary not in VOCABULARIES:
            raise ValueError(
                f"{checkpoint.folder} has a vocabulary of {vocabulary} but Baichuan-13B has 64,000 and Baichuan2-13B 125,696; "
                "pass normalized_head=False for the first, True for the second"
            )
        normalized = VOCABULARIES[vocabulary]
    return ALiBiCausalLMConfig(
        **sizes,
        intermediate_size=about.integer("intermediate_size"),
        hidden_act=about.text("hidden_act", "silu"),
        norm_eps=about.number("rms_norm_eps", 1e-6),
        normalized_head=normalized,
        tie_word_embeddings=about.flag("tie_word_embeddings", False),
        checkpoint_rounding="positions",
        trained_length=about.integer("model_max_length", 4096),
        source="Baichuan2" if normalized else "Baichuan",
    )


PARTS = decoder_parts(
    "input_layernorm",
    "self_attn.W_pack",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

FAMILY = Family(
    name="Baichuan-13B",
    model_types=("baichuan",),
    body="model.",
    layers="model.layers.",
    marks=("self_attn.W_pack.weight",),
    outside={"embed_tokens": Source(("model.embed_tokens",)), "norm": Source(("model.norm",))},
    parts=lambda _: PARTS,
    ignored=r"model\.future_mask",
    classes=("baichuan",),
    config=config,
)
