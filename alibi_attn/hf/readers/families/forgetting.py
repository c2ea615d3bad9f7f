"""The Forgetting Transformer (FoX), of its authors and of flash-linear-attention: forget gates, no positions, RMS norm, SwiGLU.

The gate of a head and token is sigmoid(f_proj(x)), with a bias. Optional: RMS norms of queries and keys per head, whose ε is 1e-5
whatever the config says, and whose weights the authors may share between heads; biases of q, k and v; shifts of keys and values;
an RMS norm of the output per head; an output gate, o ← sigmoid(g_proj(x))·o. flash-linear-attention reads `window_size` only to
shorten its cache, so that a cached token and a full pass differ; it is refused. The authors' code shifts a chunk after cached
tokens as if there were none; here it equals a full pass. Sources: forgetting_transformer/model of the authors;
fla/layers/forgetting_attn.py and fla/models/forgetting_transformer; Lin et al. 2025 (arXiv:2503.02130).
"""

from collections.abc import Collection

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Parts, Source, decoder_parts

MULTIPLE = 256  # of the feed-forward's width
HEAD_NORM_EPS = 1e-5


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Absent fields have the original's defaults. The width of the feed-forward may be computed from hidden_ratio."""
    about = checkpoint.about
    sizes = about.shared("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
    heads, inner = sizes["num_attention_heads"], int(sizes["hidden_size"] * about.number("hidden_ratio", 4.0) * 2 / 3)
    about.must_be(window_size=None, hidden_act=("swish", "silu"), use_rope=False)
    about.must_be(fgate_type="full", ogate_act="sigmoid")
    if about.flag("qk_norm_share_param_across_head", False):
        for name, weight in checkpoint.tensors.items():
            if name.endswith(("attn.q_norm.weight", "attn.k_norm.weight")):
                checkpoint.tensors[name] = weight.repeat(heads)
    return ALiBiCausalLMConfig(
        **sizes,
        num_key_value_heads=about.integer("num_kv_heads", heads),
        intermediate_size=about.integer("intermediate_size", MULTIPLE * -(-inner // MULTIPLE)),
        norm_eps=about.number("norm_eps", 1e-6),
        attention_bias=about.flag("qkv_bias", False),
        head_norm_eps=HEAD_NORM_EPS if about.flag("qk_norm", False) else None,
        forget_gate=True,
        output_gate=about.flag("use_output_gate", False),
        key_shift=about.flag("use_k_shift", False),
        value_shift=about.flag("use_v_shift", False),
        output_norm=about.flag("use_output_norm", False),
        slopes=[0.0] * heads,
        tie_word_embeddings=about.flag("tie_word_embeddings", False),
    )


def parts(names: Collection[str]) -> Parts:
    """The authors' names, or those of flash-linear-attention."""
    endings = {name.partition("layers.0.")[2] for name in names}
    is_authors = "attn.fgate_proj.bias" in endings
    forget, gate = ("attn.fgate_proj", "attn.ogate_proj") if is_authors else ("attn.f_proj", "attn.g_proj")
    more = {"forget_proj": forget, "gate_proj": gate, "output_norm": "attn.output_norm"}
    more |= {"q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}
    qkv = ["attn.q_proj"]
    for part, name in (("key", "attn.k_proj"), ("value", "attn.v_proj")):
        is_shifted = f"{name}.shift_proj.weight" in endings
        qkv.append(f"{name}.linear" if is_shifted else name)
        more[f"{part}_shift.proj"] = f"{name}.shift_proj"
    halves = [Source(("mlp.gate_proj",), half=half) for half in (0, 1)]
    gate_and_up = halves if is_authors else ["mlp.gate_proj", "mlp.up_proj"]
    stored = decoder_parts("attn_norm", tuple(qkv), "attn.o_proj", "mlp_norm", *gate_and_up, "mlp.down_proj")
    return stored | {f"attention.{ours}": Source((theirs,)) for ours, theirs in more.items()}


FAMILY = Family(
    name="FoX",
    model_types=("forgetting_transformer", "forgetting_transformer-project_fox"),
    body="model.",
    layers="model.layers.",
    marks=("attn.f_proj.bias", "attn.fgate_proj.bias"),
    outside={"embed_tokens": Source(("model.embeddings",)), "norm": Source(("model.norm",))},
    parts=parts,
    config=config,
)
