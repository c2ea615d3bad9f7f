"""A checkpoint of any of the families, or of ours, as a config and a state dict of ours; refused by name where they do not fit.

Sizes are taken from the tensors and compared with what config.json says; only the number of heads, the activation and what
concerns training come from there. Read before: `layouts.py`.
"""

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from alibi_attn.hf import checkpoints
from alibi_attn.hf.bert import layouts
from alibi_attn.hf.bert.config import ALiBiBertConfig, Layout

State = Mapping[str, Tensor]
Raw = Mapping[str, object]

_HUB = ("revision", "cache_dir", "token", "local_files_only")
_IGNORED = ("trust_remote_code", "use_safetensors", "weights_only")  # nothing is trusted, and both are always so
_OVERRIDES = (
    "num_labels", "id2label", "label2id", "problem_type", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "output_hidden_states", "return_dict", "initializer_range",
)  # fmt: skip
# What a config of theirs says under the name that it has here.
_KEPT = (
    *_OVERRIDES, "num_attention_heads", "hidden_act", "layer_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "emb_pooler",
)  # fmt: skip
# Fields of ours. Others are passed over: with some transformers loads code or files of another's choosing (attn_implementation,
# auto_map, transformers_weights).
_OWN = (*_OVERRIDES, *(name for name in ALiBiBertConfig.__annotations__ if name != "model_type"))
_MOST_LABELS = 1_000_000
_MOST_VOCABULARY_PADDING = 64  # MosaicBERT rounds its vocabulary up to a multiple of 64, for the matrix units of GPUs


@dataclasses.dataclass(frozen=True)
class Found:
    """What was read.

    Args:
        config: of the model.
        state: its weights, by our names, in memory of their own.
        in_half_precision: an original that was saved in float16.
    """

    config: ALiBiBertConfig
    state: dict[str, Tensor]
    in_half_precision: bool


def read(
    model_class: type[nn.Module], folder_or_id: str | os.PathLike[str], *, new_head: bool, options: dict[str, Any]
) -> Found:
    """Config and weights for a model of this class; takes what it understands out of `options`.

    Raises:
        OSError, ValueError: as `from_pretrained` says.
    """
    hub = {name: options.pop(name) for name in _HUB if options.get(name) is not None}
    folder = checkpoints.resolve(folder_or_id, **hub)
    for name in (*_HUB, *_IGNORED):
        options.pop(name, None)
    given = options.pop("config", None)
    changes = {name: options.pop(name) for name in _OVERRIDES if name in options}
    raw = checkpoints.read_config(folder)
    held = options.pop("state_dict", None)
    state = checkpoints.read_state(folder) if held is None else held
    try:
        prefix = layouts.prefix_of(state)
        bare = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
        own = raw.get("model_type") == ALiBiBertConfig.model_type
        layout: Layout = "mosaic" if own else layouts.layout_of(bare)
        if own:
            if isinstance(given, ALiBiBertConfig):
                config = copy.deepcopy(given)
                for name, value in changes.items():
                    setattr(config, name, value)
            else:
                config = _built({**{name: raw[name] for name in _OWN if name in raw}, **changes})
            config.pooler = any(name.startswith(layouts.POOLER) for name in bare)  # a masked language model has none
            _check_sizes(vars(config), _sizes(bare, layout))
        else:
            if given is not None:
                raise ValueError(
                    "its config.json is another family's, so config cannot be passed; pass the fields to change"
                )
            config = _translated(raw, bare, state, layout, changes)
        found = _renamed(model_class, config, state, prefix, layout, new_head=new_head)
    except ValueError as error:
        raise ValueError(f"{folder} cannot be loaded as {model_class.__name__}: {error}") from None
    return Found(config, found, not own and state[prefix + layouts.WORDS].dtype == torch.float16)


def _translated(raw: Raw, bare: State, state: State, layout: Layout, changes: Mapping[str, object]) -> ALiBiBertConfig:
    """Their config, with sizes from the tensors."""
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise ValueError("config.json says is_decoder or add_cross_attention, and these are encoders")
    if raw.get("alibi_scaling") not in (None, 1):
        raise ValueError(
            f"config.json says alibi_scaling {raw['alibi_scaling']!r}, slopes that no published family has"
        )
    if raw.get("num_attention_heads") is None:
        raise ValueError("config.json does not say num_attention_heads, which tensors do not tell; add it")
    fields: dict[str, object] = {name: raw[name] for name in _KEPT if raw.get(name) is not None}
    sizes = _sizes(bare, layout)
    _check_sizes(raw, sizes)
    fields |= sizes
    if "classifier.weight" in state and "num_labels" not in changes and "id2label" not in changes:
        rows = len(state["classifier.weight"]) if state["classifier.weight"].ndim else 0
        names = raw.get("id2label")
        if isinstance(names, dict) and len(names) != rows:
            raise ValueError(f"classifier.weight has {rows} rows but config.json names {len(names)} labels in id2label")
        if not isinstance(names, dict):
            fields["num_labels"] = rows
    fields |= {
        "gate_act": _gate_act(raw, layout),
        "gate": "second" if layout == "jina-code" else "first",
        "qk_norm": layout == "jina-code",
        "extra_norm": layout == "jina-code",
        "qkv_bias": any(".Wqkv.bias" in name or ".query.bias" in name for name in bare),
        "pooler": any(name.startswith(layouts.POOLER) for name in bare),
        "original_layout": layout,
    }
    return _built({**fields, **changes})


def _gate_act(raw: Raw, layout: Layout) -> str:
    """MosaicBERT's is always GELU; Jina's config says which gated unit it is."""
    if layout == "mosaic":
        return "gelu"
    kinds = {"geglu": "gelu", "reglu": "relu"}
    kind = raw.get("feed_forward_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"config.json says feed_forward_type {kind!r} but must say 'geglu' or 'reglu', which tensors do not tell"
        )
    return kinds[kind]


def _sizes(bare: State, layout: Layout) -> dict[str, int]:
    """What the tensors say."""
    gated = layouts.their_names("encoder.layer.0.mlp.gated_layers.weight", layout)[0]
    types = "embeddings.token_type_embeddings.weight"
    for name in (layouts.WORDS, types, gated):
        if name not in bare:
            raise ValueError(f"it lacks {name}")
        if bare[name].ndim != 2:
            raise ValueError(f"{name} has shape {list(bare[name].shape)} but must have two axes")
    return {
        "vocab_size": bare[layouts.WORDS].shape[0],
        "hidden_size": bare[layouts.WORDS].shape[1],
        "type_vocab_size": bare[types].shape[0],
        "intermediate_size": bare[gated].shape[0] // 2,
        "num_hidden_layers": layouts.number_of_layers(bare),
    }


def _check_sizes(said: Raw, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        claimed = said.get(name)
        if claimed is None or claimed == size:
            continue
        rounded_up = name == "vocab_size" and isinstance(claimed, int) and 0 < size - claimed < _MOST_VOCABULARY_PADDING
        if not (rounded_up and size % 8 == 0):
            raise ValueError(f"config.json says {name} {claimed!r} but the tensors have {size}")


def _built(fields: Mapping[str, object]) -> ALiBiBertConfig:
    labels = fields.get("num_labels")
    if labels is not None and not (
        type(labels) is int and 0 < labels <= _MOST_LABELS
    ):  # transformers names each of them
        raise ValueError(f"num_labels is {labels!r} but must be an integer from 1 to {_MOST_LABELS}")
    try:
        return ALiBiBertConfig.from_dict(dict(fields))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"config.json makes no model: {' '.join(str(error).split())}") from None


def _renamed(
    model_class: type[nn.Module], config: ALiBiBertConfig, state: State, prefix: str, layout: Layout, *, new_head: bool
) -> dict[str, Tensor]:
    """Every weight of the model, by its own name, in memory of its own; and none that nobody knows."""
    with torch.device("meta"):
        model = model_class(config)
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    tied = {name for name in wanted if name == "cls.predictions.decoder.weight" and config.tie_word_embeddings}
    inner = "bert." if any(name.startswith("bert.") for name in wanted) else ""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    lacking: list[str] = []
    for ours, shape in wanted.items():
        is_bare = ours.startswith(inner) and not ours.startswith(layouts.HEADS)
        theirs = (
            [prefix + name for name in layouts.their_names(ours.removeprefix(inner), layout)] if is_bare else [ours]
        )
        if not is_bare:
            theirs = next(([name] for name in (ours, *layouts.head_aliases(ours)) if name in state), theirs)
            used |= {name for name in layouts.head_aliases(ours) if name in state}
        is_head = not is_bare or ours.removeprefix(inner).startswith(layouts.POOLER)
        parts = [state[name] for name in theirs if name in state]
        used |= set(theirs)
        if len(parts) < len(theirs):
            if ours not in tied and not (new_head and is_head):
                lacking += [name for name in theirs if name not in state]
            continue
        if integers := [name for name, part in zip(theirs, parts, strict=True) if not part.is_floating_point()]:
            raise ValueError(f"{integers[0]} is {state[integers[0]].dtype} but weights are floating-point numbers")
        part_shape = (shape[0] // len(theirs), *shape[1:])
        wrong = [name for name, part in zip(theirs, parts, strict=True) if tuple(part.shape) != part_shape]
        if wrong and new_head and ours.startswith("classifier."):
            continue
        if wrong:
            raise ValueError(f"{wrong[0]} has shape {list(state[wrong[0]].shape)} but must have {list(part_shape)}")
        found[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    if lacking:
        is_head = all(name.startswith(layouts.HEADS) or layouts.POOLER in name for name in lacking)
        hint = "; pass new_head=True to have a head drawn at random, and train it" if is_head else ""
        raise ValueError(f"it lacks {_listed(lacking)}{hint}")
    if unknown := [name for name in state if name not in used and not _may_be_left(name, prefix)]:
        raise ValueError(f"it has weights that nobody knows: {_listed(unknown)}")
    for ours in tied & found.keys():
        if not torch.equal(found[ours], found[inner + layouts.WORDS]):
            raise ValueError(
                f"{ours} differs from the word embeddings but config.json ties them; say tie_word_embeddings false"
            )
    return found


def _may_be_left(name: str, prefix: str) -> bool:
    """Known buffers, and heads that this model has not."""
    bare = name.removeprefix(prefix)
    return bool(layouts.BUFFERS.fullmatch(bare)) or name.startswith(layouts.HEADS) or bare.startswith(layouts.POOLER)


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
