"""BTLM-3B-8K and Jais: GPT-2's layout (LayerNorms and biases, Conv1D [in, out]), SwiGLU, muP factors, slopes in the checkpoint.

    scores = q·k/D with muP, else q·k/√D, optionally divided by (layer + 1);  bias = −(slopes/s)·|i − j|
    feed-forward: c_proj(c_fc(x)·silu(c_fc2(x)));  embeddings and logits are multiplied by factors from the config

The slopes are a parameter, [H, 1], which was rounded with the checkpoint. Early Jais names the factors differently. Sources: the
JAIS code in transformers' pull request 32436; the layers and converters of Cerebras' modelzoo; BTLM: arXiv:2309.11568; Jais:
arXiv:2308.16149; alibi_scaling: arXiv:2310.13017.
"""

from typing import Any

import torch

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Options, Source, decoder_parts

SLOPES = "transformer.relative_pe.slopes"
_DROPOUTS = {"embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop"}


def gpt2_fields(about: Options) -> dict[str, Any]:
    """The fields that a config shares with GPT-2's, in our names."""
    sizes = about.shared("vocab_size", "n_embd", "n_layer", "n_head")
    return {
        **sizes,
        **dict.fromkeys(("norm_bias", "attention_bias", "output_bias", "ffn_bias"), True),
        **{ours: about.number(theirs, 0.1) for ours, theirs in _DROPOUTS.items()},
        "intermediate_size": about.integer("n_inner", 4 * sizes["hidden_size"]),
        "hidden_act": about.text("activation_function", "gelu_new"),
        "gated": False,
        "norm": "layer",
        "norm_eps": about.number("layer_norm_epsilon", 1e-5),
        "scale_by_inverse_layer": about.flag("scale_attn_by_inverse_layer_idx", False),
        "trained_length": about.integer("n_positions", 1024),
    }


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Removes the slopes from the state."""
    about = checkpoint.about
    about.must_be(position_embedding_type="alibi", scale_attn_weights=True, add_cross_attention=False)
    fields = gpt2_fields(about)
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if fields["hidden_act"] == "swiglu":
        fields |= {"hidden_act": "silu", "gated": True}
    # Early Jais has other names for the muP factors, and one factor of the logits instead of two.
    early = not any(name.startswith("mup_") for name in about.values)
    mup = about.flag("scale_qk_dot_by_d" if early else "mup_scale_qk_dot_by_d", False)
    if early:
        logit_scale = about.number("width_scale", 1.0)
    else:
        logit_scale = about.number("mup_output_alpha", 1.0) * about.number("mup_width_scale", 1.0)
    return ALiBiCausalLMConfig(
        **fields,
        attention_scale=heads / width if mup and width else None,
        slopes=_slopes(checkpoint, heads),
        alibi_scaling=dict(about.section("alibi_scaling").values) or None,
        embedding_scale=about.number("embeddings_scale" if early else "mup_embeddings_scale", 1.0),
        logit_scale=logit_scale,
        tie_word_embeddings=about.flag("tie_word_embeddings", True),
        checkpoint_rounding="distances",
    )


def _slopes(checkpoint: Checkpoint, heads: int) -> list[float]:
    """m of each head, as stored."""
    slopes = checkpoint.tensors.pop(SLOPES, None)
    if slopes is None:
        raise ValueError(f"{checkpoint.folder}: the weights {SLOPES}, the slopes, are missing; download it again")
    if slopes.numel() != heads or slopes.shape[0] != heads or not bool(torch.isfinite(slopes).all()):
        raise ValueError(
            f"{checkpoint.folder} has {SLOPES} of shape {list(slopes.shape)} but its {heads} heads need finite numbers "
            f"[{heads}, 1]; save the checkpoint again"
        )
    return [float(slope) for slope in slopes.double().flatten()]


_PARTS = decoder_parts(
    "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc2", "mlp.c_fc", "mlp.c_proj", transposed=True
)

FAMILY = Family(
    name="BTLM or Jais",
    model_types=("btlm", "jais"),
    body="transformer.",
    layers="transformer.h.",
    marks=("attn.c_attn.weight",),
    outside={"embed_tokens": Source(("transformer.wte",)), "norm": Source(("transformer.ln_f",))},
    parts=lambda _: _PARTS,
    ignored=r".*\.attn\.(masked_)?bias",
    classes=("btlm", "jais"),
    config=config,
)
