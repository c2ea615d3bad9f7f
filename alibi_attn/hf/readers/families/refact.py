"""Refact-1.6B: no biases, not even in LayerNorms, one key head, SwiGLU of width 256·⌈(2/3)·4E/256⌉, published slopes.

The published checkpoint fuses keys and values, and both halves of SwiGLU; earlier ones store them separately. With
numerics="checkpoint" biases are m·(j + 1) in the model's dtype. In half precision, if both softmax options of its
config are true, the original multiplies scores by (layer + 1). Its training code and all other implementations do not,
and this one does not either. Source: modeling_gpt_refact.py; weight names of the published checkpoint as read by
llama.cpp.
"""

from collections.abc import Collection

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Parts, Source, decoder_parts

MULTIPLE = 256  # of the feed-forward's width


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """The width of the feed-forward is computed from n_inner."""
    about = checkpoint.about
    sizes = about.shared("vocab_size", "n_embd", "n_layer", "n_head")
    inner = int(2 * about.integer("n_inner", 4 * sizes["hidden_size"]) / 3)
    about.must_be(scale_attn_weights=True, add_cross_attention=False)
    return ALiBiCausalLMConfig(
        **sizes,
        num_key_value_heads=1,
        intermediate_size=MULTIPLE * -(-inner // MULTIPLE),
        norm="layer",
        norm_eps=about.number("layer_norm_epsilon", 1e-5),
        checkpoint_rounding="counts",
        trained_length=about.integer("n_positions", 1024),
    )


def parts(names: Collection[str]) -> Parts:
    """Keys and values may be separate or fused, and so may the two halves of SwiGLU."""
    together = any(name.endswith("attn.kv.weight") for name in names)
    halves = any(name.endswith("mlp.gate_up_proj.weight") for name in names)
    keys_and_values = ("attn.kv",) if together else ("attn.k", "attn.v")
    gate_and_up = (
        [Source(("mlp.gate_up_proj",), half=half) for half in (0, 1)] if halves else ["mlp.linear_1", "mlp.linear_3"]
    )
    return decoder_parts("ln_1", ("attn.q", *keys_and_values), "attn.c_proj", "ln_2", *gate_and_up, "mlp.c_proj")


FAMILY = Family(
    name="Refact",
    model_types=("gpt_refact",),
    body="transformer.",
    layers="transformer.h.",
    marks=("attn.q.weight",),
    outside={"embed_tokens": Source(("transformer.wte",)), "norm": Source(("ln_f",))},
    parts=parts,
    ignored=r"transformer\.bias",
    config=config,
)
