"""A model as its family wrote it: the original's key names and config, for the family's own code and for `loading.py`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from alibi_attn.hf import checkpoints
from alibi_attn.hf import folder as folders
from alibi_attn.hf.bert import layouts
from alibi_attn.hf.bert.config import LAYOUTS, ALiBiBertConfig, Layout

# What the families' own configs have, besides what we say under other names.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size",
    "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "layer_norm_eps",
    "initializer_range", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
    "problem_type",
)  # fmt: skip


def save_original(model: PreTrainedModel, folder: str | os.PathLike[str], layout: str) -> None:
    """Write config.json and model.safetensors into a new folder, which is there whole or not at all.

    Raises:
        ValueError: an unknown layout, or one that has no names for this model.
        FileExistsError: the folder exists.
    """
    config = model.config
    assert isinstance(config, ALiBiBertConfig)
    chosen = _layout(config.original_layout if layout == "original" else layout, config)
    target = Path(folder)
    folders.check_new(target)
    inner = "bert." if hasattr(model, "bert") else ""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "cls.predictions.decoder.weight" and config.tie_word_embeddings:
            continue  # one tensor under two names is nothing that safetensors keeps
        is_bare = name.startswith(inner) and not name.startswith(layouts.HEADS)
        named = layouts.split(name.removeprefix(inner), tensor, chosen) if is_bare else {name: tensor}
        before = inner if is_bare else ""
        tensors |= {before + theirs: x.detach().cpu().contiguous() for theirs, x in named.items()}
    with folders.written_whole(target) as temporary:
        save_file(tensors, temporary / checkpoints.SAFE, metadata={"format": "pt"})
        said = _config(model, config, chosen)
        (temporary / checkpoints.CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _layout(name: str, config: ALiBiBertConfig) -> Layout:
    chosen = next((known for known in LAYOUTS if known == name), None)
    if chosen is None:
        raise ValueError(f"layout is {name!r} but must be 'own', 'original' or one of {', '.join(map(repr, LAYOUTS))}")
    is_code = chosen == "jina-code"
    kind = (config.gate, config.qk_norm, config.extra_norm)
    if kind != (("second", True, True) if is_code else ("first", False, False)) or not config.qkv_bias:
        raise ValueError(
            f"layout {name!r} has no names for a model with gate={config.gate!r}, qk_norm={config.qk_norm}, "
            f"extra_norm={config.extra_norm}, qkv_bias={config.qkv_bias}; pass layout='own'"
        )
    if chosen == "mosaic" and config.gate_act != "gelu":
        raise ValueError(
            f"layout 'mosaic' has GELU in its gates but gate_act is {config.gate_act!r}; pass layout='jina'"
        )
    return chosen


def _config(model: PreTrainedModel, config: ALiBiBertConfig, layout: Layout) -> Mapping[str, Any]:
    said = {name: getattr(config, name) for name in _SHARED}
    said |= {"model_type": "bert", "torch_dtype": str(model.dtype).removeprefix("torch.")}
    head = type(model).__name__.removeprefix("ALiBiBert")
    said["architectures"] = [f"Bert{head}" if layout == "mosaic" else f"JinaBert{head}"]
    if head == "ForSequenceClassification":
        said |= {"id2label": config.id2label, "label2id": config.label2id}
    if layout == "mosaic":
        return {**said, "alibi_starting_size": config.max_position_embeddings}
    kind = "geglu" if config.gate_act == "gelu" else "reglu"
    return {**said, "position_embedding_type": "alibi", "feed_forward_type": kind, "emb_pooler": config.emb_pooler}
