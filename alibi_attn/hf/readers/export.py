"""Converts between our decoder's state dict and MPT / BLOOM checkpoints, with equal logits.

The decoder as a state dict (E the width, V the vocabulary):

    embedding.weight [V, E]                              token embeddings, shared with the output
    embedding_norm.weight, .bias [E]                     BLOOM only: LayerNorm of the embeddings
    blocks.N.attention_norm.weight [E]                   LayerNorm
    blocks.N.attention.{q,k,v,out}_proj.weight           grouped-query attention allowed
    blocks.N.ffn_norm.weight, ffn.0.weight, ffn.3.weight   LayerNorm, then W₂·GELU(W₁·x), up to 4·E wide
    norm.weight [E]                                      final LayerNorm

and for BLOOM a `.bias` for every weight but the embeddings'. The blocks are `ALiBiTransformerBlock`s.

* MPT: LayerNorm without bias, no biases, GELU. A decoder with RMS norm, gated feed-forwards or QK-norm raises an error.
* BLOOM: LayerNorms and linear layers with biases, a LayerNorm after the embeddings, GELU approximated with tanh: in
  `ALiBiTransformerBlock(E, H, bias=True)` make ffn[1] an `nn.GELU(approximate="tanh")`. A state dict does not record
  which GELU it was trained with; with the exact one, each activation is off by up to 5e-4.

Source: modeling_mpt.py and modeling_bloom.py of transformers.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM, PreTrainedModel
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from alibi_attn.files import check_new, new_folder
from alibi_attn.hf.readers import folder_check
from alibi_attn.hf.readers.checkpoint_files import read_config
from alibi_attn.hf.readers.families import bloom, mpt
from alibi_attn.hf.readers.families.family import PatchedFamily, StepModules
from alibi_attn.hf.readers.tokenizing import byte_tokenizer

_Model = TypeVar("_Model", MptForCausalLM, BloomForCausalLM)
State: TypeAlias = Mapping[str, Tensor]
Kind: TypeAlias = Literal["weight", "bias"]

PARTS = (
    "attention_norm",
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.out_proj",
    "ffn_norm",
    "ffn.0",
    "ffn.3",
)

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Settings that a state dict does not contain.

    Args:
        num_heads: H.
        trained_length: becomes MPT's `max_seq_len`, beyond which an MPT in transformers fails unless it is patched, and BLOOM's
            `seq_length`, which has no effect.
        embedding_scale: factor of the embeddings before the first block, often √E; not applied at the output.
        bias_max: with a power of two of heads, the last slope is 2^−bias_max. transformers' MPT ignores all but 8 unless it is
            patched.
        norm_eps: of all norms.
    """

    num_heads: int
    trained_length: int
    embedding_scale: float = 1.0
    bias_max: int = 8
    norm_eps: float = 1e-5


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a family of transformers stores a decoder.

    Args:
        family: its row in `families/`.
        kinds: the tensors of its linear layers and norms.
        advice: the parts that an exported decoder must have, for errors.
    """

    family: PatchedFamily
    kinds: tuple[Kind, ...]
    advice: str

    @property
    def step(self) -> StepModules:
        """The names of its modules."""
        assert self.family.step is not None
        return self.family.step

    def outside_names(self) -> dict[str, str]:
        """Our weight -> theirs, outside the blocks; an embedding has no bias."""
        modules = {"embedding_norm": self.step.first_norm, "norm": self.step.last_norm}
        norms = {f"{ours}.{kind}": f"{their}.{kind}" for ours, their in modules.items() if their for kind in self.kinds}
        return {"embedding.weight": f"{self.step.embedding}.weight", **norms}

    def block_names(self, n: int, kind: Kind) -> list[str]:
        """Norms and linear layers of a block in the order of `PARTS`, with queries, keys and values fused."""
        step, (first, second) = self.step, self.step.norms
        of_attention = [f"{step.attention}.{name}" for name in (step.qkv, step.out)]
        of_ffn = [f"{step.ffn}.{name}" for name in (step.up, step.down)]
        return [f"{step.blocks}.{n}.{name}.{kind}" for name in (first, *of_attention, second, *of_ffn)]


MPT = _Layout(
    mpt.FAMILY,
    ("weight",),
    "embedding, ALiBiTransformerBlocks without biases, QK-norm or learned slopes, and a norm (LayerNorm and GELU: MPT has no "
    "gated feed-forward and no RMS norm)",
)
BLOOM = _Layout(
    bloom.FAMILY,
    ("weight", "bias"),
    "embedding, embedding_norm, ALiBiTransformerBlocks with bias=True and without QK-norm or learned slopes, and a norm "
    "(LayerNorms, and GELU approximated with tanh)",
)
_BLOOM_LENGTH = 2048  # of the published checkpoints; used if a config has no seq_length


def export_mpt(state: State, config: DecoderConfig, folder: str | Path, *, tokenizer: Tokenizer | None = None) -> Path:
    """Write the decoder as an MPT checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads with equal logits.

    Shared key and value heads are repeated for each query head, and a narrower feed-forward is padded with zeros. The embeddings
    are multiplied by their scale, and the last norm is divided by it.

    Args:
        tokenizer: of the `tokenizers` library, written to the same folder. With None and a vocabulary of 256, the byte tokenizer
            is written.

    Raises:
        ValueError: the state dict does not fit this family; the message names the entry.
        FileExistsError: the folder exists.
    """
    num_layers, width = _checked(state, config, Path(folder), MPT)
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
    embedding, norm = state["embedding.weight"] * config.embedding_scale, state["norm.weight"] / config.embedding_scale
    scaled = {**state, "embedding.weight": embedding, "norm.weight": norm}
    return _exported(model, scaled, config, MPT, Path(folder), tokenizer)


def import_mpt(folder: str | Path) -> tuple[dict[str, Tensor], DecoderConfig]:
    """The decoder's state dict and config from an MPT checkpoint on disk. It inverts `export_mpt`, except that repeated heads,
    padding and scaled embeddings are not undone.

    Raises:
        OSError: the folder holds no checkpoint.
        ValueError: a damaged checkpoint, one of another family, or an MPT without ALiBi.
    """
    model = _loaded(folder, MptForCausalLM, "an MPT")
    config: MptConfig = model.config
    options = config.attn_config
    assert isinstance(options, MptAttentionConfig)  # MptConfig converts it
    if not options.alibi or options.qk_ln or options.clip_qkv or options.softmax_scale is not None:
        raise ValueError(
            f"{folder} has attn_config {options.to_diff_dict()} but only ALiBi with scores over √D, without clipping or QK-norm, "
            "can be imported; patch the model instead (alibi_attn.hf.patch)"
        )
    decoder = DecoderConfig(
        num_heads=config.n_heads,
        trained_length=config.max_seq_len,
        bias_max=options.alibi_bias_max,
        norm_eps=config.layer_norm_epsilon,
    )
    return _imported(model, MPT), decoder


def export_bloom(
    state: State, config: DecoderConfig, folder: str | Path, *, tokenizer: Tokenizer | None = None
) -> Path:
    """Write the decoder as a BLOOM checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads with equal logits.

    Arguments and errors are those of `export_mpt`. BLOOM has no `embedding_scale` (a norm follows the embeddings instead), and
    its `bias_max` is 8.
    """
    num_layers, width = _checked(state, config, Path(folder), BLOOM)
    if config.embedding_scale != 1.0 or config.bias_max != 8:
        raise ValueError(
            f"embedding_scale is {config.embedding_scale} and bias_max {config.bias_max} but a BLOOM has 1.0 and 8: "
            "it normalizes its embeddings and uses the published slopes"
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
    about.seq_length = config.trained_length  # the field in published checkpoints
    return _exported(BloomForCausalLM(about), state, config, BLOOM, Path(folder), tokenizer)


def import_bloom(folder: str | Path) -> tuple[dict[str, Tensor], DecoderConfig]:
    """Like `import_mpt`, for a BLOOM checkpoint; its blocks are `ALiBiTransformerBlock`s with biases and tanh GELU."""
    model = _loaded(folder, BloomForCausalLM, "a BLOOM")
    config: BloomConfig = model.config
    if config.apply_residual_connection_post_layernorm:
        raise ValueError(
            f"{folder} has apply_residual_connection_post_layernorm: its residual starts after the norm, but ours starts "
            "before it; patch the model instead (alibi_attn.hf.patch)"
        )
    decoder = DecoderConfig(
        num_heads=config.n_head,
        trained_length=getattr(config, "seq_length", _BLOOM_LENGTH),
        norm_eps=config.layer_norm_epsilon,
    )
    return _imported(model, BLOOM), decoder


def _loaded(folder: str | Path, family: type[_Model], wanted: str) -> _Model:
    folder = Path(folder)
    kind = read_config(folder).get("model_type")
    assert family.config_class is not None  # every model with a head has one
    if kind != family.config_class.model_type:
        raise ValueError(f"{folder} holds a {kind} model but must hold {wanted}")
    return cast("_Model", folder_check.load(folder))


def _exported(
    model: _Model, state: State, config: DecoderConfig, layout: _Layout, folder: Path, tokenizer: Tokenizer | None
) -> Path:
    """Fills the model with the decoder's weights, keeps their dtype, and saves it with a tokenizer for `AutoTokenizer`."""
    width, groups = model.config.hidden_size, config.num_heads if layout.step.by_head else 1
    head_dim = width // config.num_heads
    weights = {their: state[ours] for ours, their in layout.outside_names().items()}
    for n in range(model.config.num_hidden_layers):
        for kind in layout.kinds:
            norm, *qkv, out, norm_2, up, down = _widened(state, n, kind, width=width, head_dim=head_dim)
            mixed = torch.stack([x.unflatten(0, (groups, -1)) for x in qkv], dim=1).flatten(0, 2)
            parts = (norm, mixed, out, norm_2, up, down)
            weights |= dict(zip(layout.block_names(n, kind), parts, strict=True))
    theirs = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    model.load_state_dict({**theirs, "lm_head.weight": state["embedding.weight"]}, assign=True)
    model.tie_weights()
    if tokenizer is None and model.config.vocab_size == 256:
        tokenizer = byte_tokenizer()
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (temporary / "tokenizer_config.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return folder


def _imported(model: PreTrainedModel, layout: _Layout) -> dict[str, Tensor]:
    """The inverse of `_exported`."""
    theirs = model.get_submodule("transformer").state_dict()
    weights = {ours: theirs[their] for ours, their in layout.outside_names().items()}
    groups = model.config.num_attention_heads if layout.step.by_head else 1
    for n in range(model.config.num_hidden_layers):
        for kind in layout.kinds:
            norm, mixed, *others = (theirs[name] for name in layout.block_names(n, kind))
            qkv = (x.flatten(0, 1) for x in mixed.unflatten(0, (groups, 3, -1)).unbind(1))
            weights |= {f"blocks.{n}.{part}.{kind}": x for part, x in zip(PARTS, (norm, *qkv, *others), strict=True)}
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _checked(state: State, config: DecoderConfig, folder: Path, layout: _Layout) -> tuple[int, int]:
    """(layers, E) of a decoder that this family can represent, in a new folder.

    Raises:
        ValueError: it cannot; the message names the entry.
        FileExistsError: the folder exists.
    """
    check_new(folder)
    numbers = {int(match[1]) for name in state if (match := _BLOCK.fullmatch(name))}
    blocks = {f"blocks.{n}.{part}.{kind}" for n in range(len(numbers)) for part in PARTS for kind in layout.kinds}
    wanted = blocks | layout.outside_names().keys()
    missing, foreign = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
    family = layout.family.name
    if foreign or missing or not numbers:
        raise ValueError(
            f"the state dict cannot be exported as {family}: unexpected {', '.join(foreign[:3]) or 'nothing'}, missing "
            f"{', '.join(missing[:3]) or 'nothing'}; {family} is {layout.advice}"
        )
    width = state["embedding.weight"].shape[1]
    if config.num_heads < 1 or width % config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads} but must divide the width, {width}")
    for n in range(len(numbers)):
        hidden = state[f"blocks.{n}.ffn.0.weight"].shape[0]
        if hidden > 4 * width:
            raise ValueError(
                f"blocks.{n}.ffn is {hidden} wide but must be at most 4·{width} = {4 * width}, the width of {family}"
            )
        rows = state[f"blocks.{n}.attention.k_proj.weight"].shape[0]
        if width % rows or rows % (width // config.num_heads):
            raise ValueError(
                f"blocks.{n}.attention.k_proj has {rows} rows but must have a divisor of {width} that is a multiple of the head "
                f"size, {width // config.num_heads}"
            )
    return len(numbers), width


def _widened(state: State, n: int, kind: Kind, *, width: int, head_dim: int) -> list[Tensor]:
    """The tensors of block n in the order of `PARTS`, in the sizes of transformers: shared key and value heads are repeated for
    each query head, and a narrower feed-forward is padded with zeros.
    """
    norm_1, query, key, value, out, norm_2, up, down = (state[f"blocks.{n}.{part}.{kind}"] for part in PARTS)
    shared = width // key.shape[0]
    key, value = (x.unflatten(0, (-1, head_dim)).repeat_interleave(shared, 0).flatten(0, 1) for x in (key, value))
    up = torch.cat([up, up.new_zeros(4 * width - up.shape[0], *up.shape[1:])])
    if kind == "weight":
        down = torch.nn.functional.pad(down, (0, 4 * width - down.shape[1]))
    return [norm_1, query, key, value, out, norm_2, up, down]
