"""The Forgetting Transformer (FoX) of flash-linear-attention: forget gates in place of positions, RMS norm, SwiGLU.

The gate of a head and token is sigmoid(f_proj(x)), with a bias. Optional: RMS norms of queries and keys per head, whose ε is 1e-5
whatever the config says; biases of q, k and v; an output gate, o ← sigmoid(g_proj(x))·o. The original reads `window_size` only to
shorten its cache, so that a cached token and a full pass differ; it is refused. Source: fla/layers/forgetting_attn.py and
fla/models/forgetting_transformer; Lin et al. 2025 (arXiv:2503.02130).
"""

from collections.abc import Collection

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Parts, Source, decoder_parts

MULTIPLE = 256  # of the feed-forward's width
HEAD_NORM_EPS = 1e-5


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Absent fields have the original's defaults. The width of the feed-forward may be computed from hidden_ratio."""
    about = checkpoint.about
    width, heads = about.integer("hidden_size"), about.integer("num_heads")
    inner = int(width * about.integer("hidden_ratio", 4) * 2 / 3)
    about.must_be("window_size", None)
    about.must_be("hidden_act", "swish", "silu")
    return ALiBiCausalLMConfig(
        vocab_size=about.integer("vocab_size"),
        hidden_size=width,
        num_hidden_layers=about.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=about.integer("num_kv_heads", heads),
        intermediate_size=about.integer("intermediate_size", MULTIPLE * -(-inner // MULTIPLE)),
        norm_eps=about.number("norm_eps", 1e-6),
        attention_bias=about.flag("qkv_bias", False),
        head_norm_eps=HEAD_NORM_EPS if about.flag("qk_norm", False) else None,
        forget_gate=True,
        output_gate=about.flag("use_output_gate", False),
        slopes=[0.0] * heads,
        tie_word_embeddings=about.flag("tie_word_embeddings", False),
        source="FoX",
    )


def parts(_: Collection[str]) -> Parts:
    """The names of a layer."""
    qkv = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    stored = decoder_parts("attn_norm", qkv, "attn.o_proj", "mlp_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    more = {"forget_proj": "attn.f_proj", "gate_proj": "attn.g_proj", "q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}
    return stored | {f"attention.{ours}": Source((theirs,)) for ours, theirs in more.items()}


FAMILY = Family(
    name="FoX",
    model_types=("forgetting_transformer",),
    body="model.",
    layers="model.layers.",
    marks=("attn.f_proj.bias",),
    outside={"embed_tokens": Source(("model.embeddings",)), "norm": Source(("model.norm",))},
    parts=parts,
    config=config,
)
