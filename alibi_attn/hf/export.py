"""Checkpoints to and fro: a decoder of ours (`decoder.py`) as a standard MPT or BLOOM checkpoint, and those as a decoder.

The logits are equal, because the decoder *is* that model:

* MPT: LayerNorm without bias, no biases, GELU. What it cannot express (RMS norm, gated feed-forwards, QK-norm) is refused.
* BLOOM: LayerNorms and linear maps with biases, a LayerNorm behind the embeddings, GELU approximated with tanh: in
  `ALiBiTransformerBlock(E, H, bias=True)` make ffn[1] an `nn.GELU(approximate="tanh")`. A state dict does not say which
  GELU it was trained with; the exact one loses up to 5e-4 an activation.

Source: modeling_mpt.py and modeling_bloom.py of transformers.
"""

from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from alibi_attn.hf import folder as folders
from alibi_attn.hf.decoder import PARTS, DecoderConfig, Family, Kind, State, layers_and_width, widened
from alibi_attn.strict_json import JsonError, parse

_Model = TypeVar("_Model", MptForCausalLM, BloomForCausalLM)

MPT = Family(
    "MPT",
    ("weight",),
    ("embedding.weight", "norm.weight"),
    "embedding, ALiBiTransformerBlocks without biases, QK-norm or learned slopes, and a norm (LayerNorm and GELU: a gated or "
    "RMS-normed model has no MPT)",
)
BLOOM = Family(
    "BLOOM",
    ("weight", "bias"),
    ("embedding.weight", "embedding_norm.weight", "embedding_norm.bias", "norm.weight", "norm.bias"),
    "embedding, embedding_norm, ALiBiTransformerBlocks with bias=True and without QK-norm or learned slopes, and a norm "
    "(LayerNorms, and GELU approximated with tanh)",
)
_MPT_PARTS = ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")
_BLOOM_PARTS = (
    "input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
    "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip
_BLOOM_OUTSIDE = {
    "embedding.weight": "word_embeddings.weight",
    **{f"embedding_norm.{kind}": f"word_embeddings_layernorm.{kind}" for kind in BLOOM.kinds},
    **{f"norm.{kind}": f"ln_f.{kind}" for kind in BLOOM.kinds},
}
_BLOOM_LENGTH = 2048  # of the published checkpoints, where a config does not say it


def export_mpt(state: State, config: DecoderConfig, folder: Path, *, tokenizer: Tokenizer | None = None) -> Path:
    """Write the decoder as an MPT checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads with equal logits.

    Key and value heads that are shared are written once for each query head, a narrower feed-forward is padded with
    zeros, and the scale of the embeddings goes into them, and out of the last norm.

    Args:
        tokenizer: of the `tokenizers` library, written beside it; None for a vocabulary of 256 writes that of bytes.

    Raises:
        ValueError: a state dict that is no such decoder, with the name that does not fit.
        FileExistsError: the folder exists.
    """
    folders.check_new(folder)
    num_layers, width = layers_and_width(state, config, MPT)
    model = MptForCausalLM(
        MptConfig(
            d_model=width,
            n_heads=config.num_heads,
            n_layers=num_layers,
            max_seq_len=config.trained_length,
            vocab_size=state["embedding.weight"].shape[0],
            layer_norm_epsilon=config.norm_eps,
            learned_pos_emb=False,
            attn_config={"alibi": True, "alibi_bias_max": config.bias_max},
        )
    )
    embedding = state["embedding.weight"] * config.embedding_scale
    found = {
        "transformer.wte.weight": embedding,
        "transformer.norm_f.weight": state["norm.weight"] / config.embedding_scale,
        "lm_head.weight": embedding,
    }
    for n in range(num_layers):
        norm_1, query, key, value, *others = widened(
            state, n, "weight", width=width, head_dim=width // config.num_heads
        )
        parts = (norm_1, torch.cat([query, key, value]), *others)
        found |= {f"transformer.blocks.{n}.{part}.weight": x for part, x in zip(_MPT_PARTS, parts, strict=True)}
    model.load_state_dict(found, assign=True)  # in the dtype that the state has
    model.tie_weights()
    return folders.write(model, folder, tokenizer)


def import_mpt(folder: Path) -> tuple[dict[str, Tensor], DecoderConfig]:
    """The decoder's state dict and config of an MPT checkpoint on disk; what `export_mpt` wrote comes back the same, but for
    shared heads, padding and the embeddings' scale, which stay as MPT has them.

    Raises:
        OSError: no checkpoint there.
        ValueError: a damaged checkpoint, one of another family, or an MPT without ALiBi.
    """
    model = _loaded(folder, MptForCausalLM, "an MPT")
    config: MptConfig = model.config
    options = config.attn_config
    assert isinstance(options, MptAttentionConfig)  # MptConfig makes it one
    if not options.alibi or options.qk_ln or options.clip_qkv or options.softmax_scale is not None:
        raise ValueError(
            f"{folder} has attn_config {options.to_diff_dict()}: a decoder has ALiBi, scores over √D, and nothing clipped or "
            "normed; patch the model instead (alibi_attn.hf.patch)"
        )
    theirs = model.transformer.state_dict()
    found = {"embedding.weight": theirs["wte.weight"], "norm.weight": theirs["norm_f.weight"]}
    for n in range(config.n_layers):
        norm_1, qkv, *others = (theirs[f"blocks.{n}.{part}.weight"] for part in _MPT_PARTS)
        found |= _block(n, "weight", norm_1, qkv.chunk(3), others)
    decoder = DecoderConfig(
        num_heads=config.n_heads,
        trained_length=config.max_seq_len,
        bias_max=options.alibi_bias_max,
        norm_eps=config.layer_norm_epsilon,
    )
    return {name: tensor.detach().clone() for name, tensor in found.items()}, decoder


def export_bloom(state: State, config: DecoderConfig, folder: Path, *, tokenizer: Tokenizer | None = None) -> Path:
    """Write the decoder as a BLOOM checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads with equal logits.

    Arguments and errors are those of `export_mpt`; BLOOM has no `embedding_scale` (the norm behind the embeddings takes
    its place) and no other `bias_max` than 8.
    """
    folders.check_new(folder)
    num_layers, width = layers_and_width(state, config, BLOOM)
    if config.embedding_scale != 1.0 or config.bias_max != 8:
        raise ValueError(
            f"embedding_scale is {config.embedding_scale} and bias_max {config.bias_max} but a BLOOM has 1.0 and 8: a norm "
            "scales its embeddings, and its slopes are the published ones"
        )
    about = BloomConfig(
        hidden_size=width,
        n_head=config.num_heads,
        n_layer=num_layers,
        vocab_size=state["embedding.weight"].shape[0],
        layer_norm_epsilon=config.norm_eps,
        bos_token_id=None,
        eos_token_id=None,
    )
    about.seq_length = config.trained_length  # as published checkpoints say it
    model = BloomForCausalLM(about)
    found = {f"transformer.{theirs}": state[ours] for ours, theirs in _BLOOM_OUTSIDE.items()}
    found["lm_head.weight"] = state["embedding.weight"]
    head_dim = width // config.num_heads
    for n in range(num_layers):
        for kind in BLOOM.kinds:
            norm_1, query, key, value, *others = widened(state, n, kind, width=width, head_dim=head_dim)
            # rows by head, and inside a head q, k, v
            qkv = torch.stack([x.unflatten(0, (-1, head_dim)) for x in (query, key, value)], dim=1).flatten(0, 2)
            parts = (norm_1, qkv, *others)
            found |= {f"transformer.h.{n}.{part}.{kind}": x for part, x in zip(_BLOOM_PARTS, parts, strict=True)}
    model.load_state_dict(found, assign=True)
    model.tie_weights()
    return folders.write(model, folder, tokenizer)


def import_bloom(folder: Path) -> tuple[dict[str, Tensor], DecoderConfig]:
    """As `import_mpt`, for a BLOOM checkpoint; its blocks are `ALiBiTransformerBlock`s with biases and the GELU above."""
    model = _loaded(folder, BloomForCausalLM, "a BLOOM")
    config: BloomConfig = model.config
    if config.apply_residual_connection_post_layernorm:
        raise ValueError(
            f"{folder} has apply_residual_connection_post_layernorm, which takes the residual behind the norm; a decoder "
            "takes it before: patch the model instead (alibi_attn.hf.patch)"
        )
    theirs = model.transformer.state_dict()
    found = {name: theirs[their_name] for name, their_name in _BLOOM_OUTSIDE.items()}
    for n in range(config.n_layer):
        for kind in BLOOM.kinds:
            norm_1, qkv, *others = (theirs[f"h.{n}.{part}.{kind}"] for part in _BLOOM_PARTS)
            apart = qkv.unflatten(0, (config.n_head, 3, -1)).unbind(1)
            found |= _block(n, kind, norm_1, [x.flatten(0, 1) for x in apart], others)
    decoder = DecoderConfig(
        num_heads=config.n_head,
        trained_length=getattr(config, "seq_length", _BLOOM_LENGTH),
        norm_eps=config.layer_norm_epsilon,
    )
    return {name: tensor.detach().clone() for name, tensor in found.items()}, decoder


def _loaded(folder: Path, family: type[_Model], wanted: str) -> _Model:
    """The model with every weight from the folder: transformers would draw those that are missing at random."""
    path = folder / "config.json"
    try:
        about = parse(path.read_bytes())
    except JsonError as error:
        raise ValueError(f"{path} is not JSON ({error}); pass the folder of {wanted}") from None
    kind = about.get("model_type") if isinstance(about, dict) else None
    assert family.config_class is not None  # every model with a head names one
    if kind != family.config_class.model_type:
        raise ValueError(f"{folder} holds a {kind} model but must hold {wanted}")
    try:
        loaded: Any = family.from_pretrained(folder, output_loading_info=True)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"{folder} is damaged: {' '.join(str(error).split())}; download or export it again") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{folder} is damaged: it lacks the weights {', '.join(missing)}; download or export it again")
    return cast("_Model", model)


def _block(n: int, kind: Kind, norm: Tensor, qkv: tuple[Tensor, ...] | list[Tensor], others: list[Tensor]) -> State:
    return {f"blocks.{n}.{part}.{kind}": x for part, x in zip(PARTS, (norm, *qkv, *others), strict=True)}
