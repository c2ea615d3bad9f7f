"""Checkpoints to and fro: a decoder of `ALiBiTransformerBlock`s as a standard MPT checkpoint, and an MPT as such a decoder.

The decoder, as a state dict (E the width, V the vocabulary):

    embedding.weight [V, E]                              token embeddings, also those of the output
    blocks.N.attention_norm.weight [E]                   LayerNorm without bias
    blocks.N.attention.{q,k,v,out}_proj.weight           grouped-query attention allowed
    blocks.N.ffn_norm.weight, ffn.0.weight, ffn.3.weight   LayerNorm, then W₂·GELU(W₁·x), up to 4·E wide
    norm.weight [E]                                      LayerNorm of the end

That is what MPT is, so the logits are equal. What MPT cannot express (biases, RMS norm, gated feed-forwards, QK-norm) is
refused. There is no such way to BLOOM, which norms its embeddings and approximates its GELU. Source: modeling_mpt.py.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import MptConfig, MptForCausalLM
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

State = Mapping[str, Tensor]

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_PARTS = (
    "attention_norm.weight", "attention.q_proj.weight", "attention.k_proj.weight", "attention.v_proj.weight",
    "attention.out_proj.weight", "ffn_norm.weight", "ffn.0.weight", "ffn.3.weight",
)  # fmt: skip
_MPT_PARTS = ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What the state dict does not say.

    Args:
        num_heads: H.
        trained_length: becomes `max_seq_len`, which ends an MPT in transformers, unless it is patched.
        embedding_scale: what the embeddings are multiplied with before the first block, √E for many; not at the output.
        bias_max: the last slope of a power of two of heads is 2^−bias_max.
        norm_eps: of all norms.
    """

    num_heads: int
    trained_length: int
    embedding_scale: float = 1.0
    bias_max: int = 8
    norm_eps: float = 1e-5


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
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a checkpoint is never overwritten: pass a new folder")
    num_layers, width = _checked(state, config)
    vocabulary = state["embedding.weight"].shape[0]
    if tokenizer is None and vocabulary == 256:
        tokenizer = byte_tokenizer()
    model = MptForCausalLM(
        MptConfig(
            d_model=width,
            n_heads=config.num_heads,
            n_layers=num_layers,
            max_seq_len=config.trained_length,
            vocab_size=vocabulary,
            layer_norm_epsilon=config.norm_eps,
            learned_pos_emb=False,
            attn_config={"alibi": True, "alibi_bias_max": config.bias_max},
        )
    )
    model.load_state_dict(_as_mpt(state, config, num_layers, width), assign=True)  # in the dtype that the state has
    model.tie_weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (temporary / "tokenizer_config.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def import_mpt(folder: Path) -> tuple[dict[str, Tensor], DecoderConfig]:
    """The decoder's state dict and config of an MPT checkpoint on disk; what `export_mpt` wrote comes back the same, but for
    shared heads, padding and the embeddings' scale, which stay as MPT has them.

    Raises:
        OSError: no checkpoint there.
        ValueError: a checkpoint of another family, or an MPT without ALiBi.
    """
    about = MptConfig.get_config_dict(folder)[0]
    if about.get("model_type") != "mpt":
        raise ValueError(f"{folder} holds a {about.get('model_type')} model but must hold an MPT")
    model = MptForCausalLM.from_pretrained(folder)
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
        norm_1, qkv, out, norm_2, up, down = (theirs[f"blocks.{n}.{part}.weight"] for part in _MPT_PARTS)
        parts = (norm_1, *qkv.chunk(3), out, norm_2, up, down)
        found |= {f"blocks.{n}.{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)}
    decoder = DecoderConfig(
        num_heads=config.n_heads,
        trained_length=config.max_seq_len,
        bias_max=options.alibi_bias_max,
        norm_eps=config.layer_norm_epsilon,
    )
    return {name: tensor.detach().clone() for name, tensor in found.items()}, decoder


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b of the text in UTF-8.

    >>> byte_tokenizer().encode("añ").ids
    [97, 195, 177]
    """
    # The printable stand-ins that byte-level tokenizers write for bytes: themselves where printable, else from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _checked(state: State, config: DecoderConfig) -> tuple[int, int]:
    """(layers, width) of a state dict that is such a decoder."""
    numbers = {int(match[1]) for name in state if (match := _BLOCK.fullmatch(name))}
    wanted = {f"blocks.{n}.{part}" for n in range(len(numbers)) for part in _PARTS} | {
        "embedding.weight",
        "norm.weight",
    }
    missing, foreign = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
    if foreign or missing or not numbers:
        raise ValueError(
            f"this is no decoder that MPT can be: it has {', '.join(foreign[:3]) or 'nothing else'} and lacks "
            f"{', '.join(missing[:3]) or 'nothing'}; MPT is embedding, ALiBiTransformerBlocks without biases, QK-norm or "
            "learned slopes, and a norm (LayerNorm and GELU: a gated or RMS-normed model has no MPT)"
        )
    width = state["embedding.weight"].shape[1]
    if config.num_heads < 1 or width % config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads} but must divide the width, {width}")
    for n in range(len(numbers)):
        hidden = state[f"blocks.{n}.ffn.0.weight"].shape[0]
        if hidden > 4 * width:
            raise ValueError(f"blocks.{n}.ffn is {hidden} wide but an MPT's is 4·{width} = {4 * width}; at most that")
        rows = state[f"blocks.{n}.attention.k_proj.weight"].shape[0]
        if width % rows or rows % (width // config.num_heads):
            raise ValueError(
                f"blocks.{n}.attention.k_proj has {rows} rows, which are not heads of {width // config.num_heads}"
            )
    return len(numbers), width


def _as_mpt(state: State, config: DecoderConfig, num_layers: int, width: int) -> dict[str, Tensor]:
    head_dim = width // config.num_heads
    embedding = state["embedding.weight"] * config.embedding_scale
    found = {
        "transformer.wte.weight": embedding,
        "transformer.norm_f.weight": state["norm.weight"] / config.embedding_scale,
        "lm_head.weight": embedding,
    }
    for n in range(num_layers):
        norm_1, query, key, value, out, norm_2, up, down = (state[f"blocks.{n}.{part}"] for part in _PARTS)
        shared = config.num_heads * head_dim // key.shape[0]
        key, value = (x.unflatten(0, (-1, head_dim)).repeat_interleave(shared, 0).flatten(0, 1) for x in (key, value))
        up = torch.nn.functional.pad(up, (0, 0, 0, 4 * width - up.shape[0]))
        down = torch.nn.functional.pad(down, (0, 4 * width - down.shape[1]))
        parts = (norm_1, torch.cat([query, key, value]), out, norm_2, up, down)
        found |= {f"transformer.blocks.{n}.{part}.weight": x for part, x in zip(_MPT_PARTS, parts, strict=True)}
    return found
