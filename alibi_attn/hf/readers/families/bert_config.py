"""Translates the configs of BERT-like encoders: sizes come from the tensors, since these configs are often wrong.

Only the number of heads, the activation and training options are read from config.json. Read next: `mosaic.py`, `jina.py`.
"""

import copy
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families.family import Checkpoint, Options

WORDS, TYPES = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
PREFIXES = ("", "bert.", "model.")
HEADS = r"(cls|classifier|pooler|qa_outputs)\..*"
BUFFERS = r"embeddings\.(position_ids|token_type_ids)|encoder\.alibi"  # saved by some versions of the originals
PLAIN: dict[str, Any] = {"gate": "first", "qk_norm": False, "extra_norm": False}  # all families but Jina's code model
ALIASES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
_TRAINING = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "initializer_range",
    "problem_type",
)
# Fields that `from_pretrained` may change.
OVERRIDES = (*_TRAINING, "num_labels", "id2label", "label2id", "output_hidden_states", "return_dict")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "type_vocab_size")
_OTHERS = ("num_attention_heads", "hidden_act", "layer_norm_eps", "max_position_embeddings", "tie_word_embeddings")
# Fields that the originals have under the same name.
_SHARED = (*_OTHERS, *_TRAINING, *_IDS)
FIELDS = (*_SHARED, *_SIZES)
# Our own fields. Others are ignored: some make transformers load code or files that the config names (attn_implementation,
# auto_map, transformers_weights).
_OWN = (*OVERRIDES, *(name for name in ALiBiBertConfig.__annotations__ if name != "model_type"))
_MOST_LABELS = 1_000_000  # transformers names each of them
_MOST_VOCABULARY_PADDING = 64  # MosaicBERT rounds its vocabulary up to a multiple of 64, for the matrix units of GPUs


def own_config(checkpoint: Checkpoint) -> ALiBiBertConfig:
    """The config of a folder that `save_pretrained` wrote, or the one that was passed."""
    changes = {name: value for name, value in checkpoint.changes.items() if name != "config"}
    given, raw = checkpoint.changes.get("config"), checkpoint.about.values
    if isinstance(given, ALiBiBertConfig):
        config = copy.deepcopy(given)
        for name, value in changes.items():
            setattr(config, name, value)
    else:
        config = _built(checkpoint.about, {**{name: raw[name] for name in _OWN if name in raw}, **changes})
    config.pooler = _has_pooler(checkpoint)  # a masked language model has none
    return config


def translated(checkpoint: Checkpoint, *, gate_act: str, **fields: object) -> ALiBiBertConfig:
    """Our config for an original.

    Args:
        gate_act, fields: of `ALiBiBertConfig`.

    Raises:
        ValueError: not an encoder of these families, or sizes that contradict the tensors.
    """
    about = checkpoint.about
    if checkpoint.changes.get("config") is not None:
        raise ValueError(f"{about.where} is of another family, so config cannot be passed; pass the fields to change")
    for name in ("is_decoder", "add_cross_attention"):
        if about.values.get(name):
            raise ValueError(f"{about.where} has {name}, but only plain encoders are supported")
    about.must_be(alibi_scaling=(1, 1.0))
    if not about.has("num_attention_heads"):
        raise ValueError(f"{about.where} has no num_attention_heads, which the tensors do not determine; add it")
    sizes = _sizes(checkpoint)
    for name, size in sizes.items():
        claimed = about.values.get(name, size)
        padding = size - claimed if name == "vocab_size" and isinstance(claimed, int) and size % 8 == 0 else 0
        if claimed not in (None, size) and not 0 < padding < _MOST_VOCABULARY_PADDING:
            raise ValueError(f"{about.where} has {name} {claimed!r} but the tensors have {size}")
    config = {name: about.values[name] for name in (*_SHARED, *OVERRIDES, "emb_pooler") if about.has(name)}
    qkv_bias = checkpoint.stored("encoder.layer.0.attention.self.Wqkv.bias") in checkpoint.tensors
    config |= sizes | {"gate_act": gate_act, "qkv_bias": qkv_bias, "pooler": _has_pooler(checkpoint)} | fields
    return _built(about, {**config, **_labels(checkpoint), **checkpoint.changes})


def written(model: PreTrainedModel, prefix: str, layout: str, **choices: object) -> dict[str, Any]:
    """The part of an original's config.json that all families share.

    Args:
        prefix: of its class names.
        layout: its name, for errors.
        choices: what the model's config must have.

    Raises:
        ValueError: the layout cannot store this model.
    """
    config, head = model.config, type(model).__name__.removeprefix("ALiBiBert")
    wanted = {**choices, "qkv_bias": True, "gated": True}
    if any(getattr(config, name) != value for name, value in wanted.items()):
        has = ", ".join(f"{name}={getattr(config, name)!r}" for name in wanted)
        raise ValueError(f"layout {layout!r} has no names for a model with {has}; pass layout='own'")
    fields = {name: getattr(config, name) for name in FIELDS}
    if hasattr(model, "classifier"):
        fields |= {"id2label": config.id2label, "label2id": config.label2id}
    dtype = str(model.dtype).removeprefix("torch.")
    return {**fields, "model_type": "bert", "torch_dtype": dtype, "architectures": [f"{prefix}{head}"]}


def _has_pooler(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("pooler.") for name in checkpoint.tensors)


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """The sizes given by the tensors' shapes."""
    gated = checkpoint.stored("encoder.layer.0.mlp.gated_layers.weight")
    shapes = []
    for name in (WORDS, TYPES, gated):
        if name not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.folder}: the weights {name} are missing; download the checkpoint again")
        shapes.append(list(checkpoint.tensors[name].shape))
        if len(shapes[-1]) != 2:
            raise ValueError(f"{checkpoint.folder} has {name} of shape {shapes[-1]} but it must have two axes")
    layers = {name.split(".")[2] for name in checkpoint.tensors if name.startswith(gated.partition("0.")[0])}
    (vocabulary, width), (types, _), (rows, _) = shapes
    return dict(zip(_SIZES, (vocabulary, width, len(layers), rows // 2, types), strict=True))


def _labels(checkpoint: Checkpoint) -> dict[str, object]:
    """num_labels of a classifier whose config.json does not name its labels."""
    weight, names = checkpoint.tensors.get("classifier.weight"), checkpoint.about.values.get("id2label")
    if weight is None or not {"num_labels", "id2label"}.isdisjoint(checkpoint.changes):
        return {}
    rows = len(weight) if weight.ndim else 0
    if not isinstance(names, dict):
        return {"num_labels": rows}
    if len(names) != rows:
        raise ValueError(f"{checkpoint.about.where} names {len(names)} labels but classifier.weight has {rows} rows")
    return {}


def _built(about: Options, fields: Mapping[str, object]) -> ALiBiBertConfig:
    labels = fields.get("num_labels")
    if labels is not None and not (type(labels) is int and 0 < labels <= _MOST_LABELS):
        raise ValueError(f"{about.where}: num_labels is {labels!r} but must be an integer from 1 to {_MOST_LABELS}")
    try:
        return ALiBiBertConfig.from_dict(dict(fields))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{about.where} is invalid: {' '.join(str(error).split())}") from None
