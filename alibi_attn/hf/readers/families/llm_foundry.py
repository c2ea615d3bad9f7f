"""MPT, as written by llm-foundry or transformers: LayerNorm (or RMS norm) with or without biases, GELU, `alibi_bias_max`,
`softmax_scale`, `clip_qkv`, `qk_ln`, grouped heads, a gated feed-forward. Other options raise an error that names them.

The weight names are the same in both. transformers' class supports neither grouped heads nor `qk_ln`, and ignores
`alibi_bias_max`. The original computes its biases in fp32, so there is no rounding to reproduce. Source: llmfoundry/models of
llm-foundry.
"""

from collections.abc import Collection

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Options, Parts, Source, decoder_parts
from alibi_attn.slopes import alibi_slopes

NORMS = dict.fromkeys(("low_precision_layernorm", "layernorm"), "layer") | dict.fromkeys(
    ("low_precision_rmsnorm", "rmsnorm", "triton_rmsnorm"), "rms"
)
ACTIVATIONS = {
    ("gelu", "none"): "gelu",
    ("gelu", "tanh"): "gelu_pytorch_tanh",
    ("silu", None): "silu",
    ("relu", None): "relu",
    ("quick_gelu", None): "quick_gelu",
}


def config(checkpoint: Checkpoint) -> ALiBiCausalLMConfig:
    """Raises ValueError for an MPT without ALiBi, and for unsupported options."""
    about = checkpoint.about
    attention, feed_forward = about.section("attn_config"), about.section("ffn_config")
    _refuse_the_rest(about, attention, feed_forward)
    sizes = about.shared("vocab_size", "d_model", "n_layers", "n_heads")
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if heads < 1 or width % heads:
        raise ValueError(f"{about.where} has n_heads = {heads} but it must divide d_model = {width}")
    kind = attention.text("attn_type", "multihead_attention")
    key_heads = attention.integer("kv_n_heads") if kind == "grouped_query_attention" else heads
    key_heads = 1 if kind == "multiquery_attention" else key_heads
    by_width = about.values.get("logit_scale") == "inv_sqrt_d_model"
    # transformers' class never builds biases, whatever its config says.
    bias = not about.flag("no_bias", False) and not _is_of_transformers(about)
    norm = NORMS[about.text("norm_type", "low_precision_layernorm")]
    ratio = about.number("expansion_ratio", 4)
    return ALiBiCausalLMConfig(
        **sizes,
        num_key_value_heads=key_heads,
        intermediate_size=feed_forward.integer("ffn_hidden_size", int(width * ratio)),
        hidden_act=_activation(feed_forward),
        gated=feed_forward.text("ffn_type", "mptmlp") == "mptglu",
        norm=norm,
        norm_bias=bias and norm == "layer",
        norm_eps=about.number("norm_eps", about.number("layer_norm_epsilon", 1e-5)),
        attention_bias=about.flag("attention_bias", bias),
        output_bias=bias,
        ffn_bias=bias,
        qk_norm=attention.flag("qk_ln", False),
        clip_qkv=attention.number("clip_qkv", 0.0) or None,
        attention_scale=attention.number("softmax_scale") if attention.has("softmax_scale") else None,
        slopes=alibi_slopes(heads, bias_max=attention.number("alibi_bias_max", 8)).tolist(),
        logit_scale=width**-0.5 if by_width else about.number("logit_scale", 1.0),
        embedding_dropout=about.number("emb_pdrop", 0.0),
        residual_dropout=about.number("resid_pdrop", 0.0),
        attention_dropout=attention.number("attn_pdrop", 0.0),
        tie_word_embeddings=about.flag("tie_word_embeddings", True),
        trained_length=about.integer("max_seq_len", 2048),
    )


def _refuse_the_rest(about: Options, attention: Options, feed_forward: Options) -> None:
    if not attention.flag("alibi", _is_of_transformers(about)):
        raise ValueError(f"{attention.where} has alibi = false but only an MPT with ALiBi is supported")
    attention.must_be(attn_type=("multihead_attention", "grouped_query_attention", "multiquery_attention"))
    attention.must_be(rope=False, prefix_lm=False, attn_uses_sequence_id=False, qk_gn=False, nope=False)
    attention.must_be(sliding_window_size=-1, attn_logit_softcapping=None, kv_dim=None)
    attention.section("attn_temperature_tuning").must_be(attn_scale=(0.0, 0))
    feed_forward.must_be(ffn_type=("mptmlp", "mptglu"))
    about.must_be(norm_type=tuple(NORMS), embedding_fraction=(1.0, 1))
    if about.has("head_dim") and about.integer("head_dim") * about.integer("n_heads") != about.integer("d_model"):
        raise ValueError(f"{about.where} has a head_dim that is not d_model / n_heads, which is not supported")
    about.must_be(block_overrides=None, final_logit_softcapping=None)


def _is_of_transformers(about: Options) -> bool:
    """Only transformers uses the name layer_norm_epsilon, and it writes every field."""
    return "layer_norm_epsilon" in about.values


def _activation(feed_forward: Options) -> str:
    about = feed_forward.section("ffn_act_fn")
    name = about.text("name", "gelu")
    approximate = about.text("approximate", "none") if name == "gelu" else None
    if not about.values.keys() <= {"name", "approximate"} or (name, approximate) not in ACTIVATIONS:
        raise ValueError(
            f"{about.where} is {dict(about.values)} but its name must be one of "
            f"{', '.join(sorted({n for n, _ in ACTIVATIONS}))}, and only gelu may have approximate = none or tanh"
        )
    return ACTIVATIONS[name, approximate]


def parts(names: Collection[str]) -> Parts:
    """Query, key and value may be separate, and norms and attention may be nested in a module norm_attn_norm."""
    nested = "norm_attn_norm." if "transformer.blocks.0.norm_attn_norm.norm_1.weight" in names else ""
    fused = any(name.endswith("attn.Wqkv.weight") for name in names)
    qkv = tuple(f"{nested}attn.{name}" for name in (("Wqkv",) if fused else ("Wq", "Wk", "Wv")))
    norms = {f"attention.{x}_norm": Source((f"{nested}attn.{x}_ln",)) for x in ("q", "k")}
    return norms | decoder_parts(
        f"{nested}norm_1",
        qkv,
        f"{nested}attn.out_proj",
        f"{nested}norm_2",
        "ffn.gate_proj",
        "ffn.up_proj",
        "ffn.down_proj",
    )


FAMILY = Family(
    name="MPT",
    model_types=("mpt",),
    body="transformer.",
    layers="transformer.blocks.",
    marks=("attn.Wqkv.weight", "attn.Wq.weight", "norm_attn_norm.attn.Wqkv.weight", "norm_attn_norm.attn.Wq.weight"),
    outside={"embed_tokens": Source(("transformer.wte",)), "norm": Source(("transformer.norm_f",))},
    parts=parts,
    classes=("mptforcausallm", "mptmodel"),
    config=config,
)
