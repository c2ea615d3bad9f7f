"""Jina embeddings v2 and its code model: queries, keys and values in three matrices; the config names the gated unit.

The code model normalizes queries and keys, activates the second half of its gated layer, and has one more norm per layer.
ColBERT v1 is a Jina v2 with another head. The text tower of CLIP v1 is a Jina v2 with the names of flash-attn's BERT; its
config.json has no number of heads, which is 12 at the published width. Of its code, a public copy of modeling_clip.py and
hf_model.py confirms the names down to `text_model.transformer` and the config; that of the layers was not available to read.
Sources: Günther et al. 2023, Jina Embeddings 2 (arXiv:2310.19923); Koukounas et al. 2024, Jina CLIP (arXiv:2405.20204);
flash_attn/models/bert.py.
"""

import dataclasses
import functools
from typing import Any

from transformers import PreTrainedModel

from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families import bert_config, mosaic
from alibi_attn.hf.readers.families.family import Checkpoint, Options, Source

GATES = {"geglu": "gelu", "reglu": "relu"}  # feed_forward_type of the config -> gate_act
CODE: dict[str, Any] = {"gate": "second", "qk_norm": True, "extra_norm": True}
QKV = {"attention.self.Wqkv": Source(tuple(f"attention.self.{part}" for part in ("query", "key", "value")))}
_CODE_PARTS = {
    **QKV,
    "mlp.gated_layers": Source(("mlp.up_gated_layer",)),
    "mlp.wo": Source(("mlp.down_layer",)),
    "mlp.layernorm": Source(("layer_norm_2",)),
}
_CLIP_PARTS = {
    "attention.self.Wqkv": Source(("mixer.Wqkv",)),
    "attention.output.dense": Source(("mixer.out_proj",)),
    "attention.output.LayerNorm": Source(("norm1",)),
    "mlp.layernorm": Source(("norm2",)),
}
_CLIP_SIZE = (768, 12)  # width and heads of the published model


def config(checkpoint: Checkpoint, **fields: object) -> ALiBiBertConfig:
    """Raises ValueError for a gated unit that is neither of the two."""
    kind = checkpoint.about.values.get("feed_forward_type")
    if not isinstance(kind, str) or kind not in GATES:
        raise ValueError(f"{checkpoint.about.where} has feed_forward_type {kind!r} but must have 'geglu' or 'reglu'")
    return bert_config.translated(checkpoint, gate_act=GATES[kind], **fields)


def clip_config(checkpoint: Checkpoint) -> ALiBiBertConfig:
    """Reads the config of a CLIP, or of its text tower alone."""
    about = checkpoint.about
    if about.has("text_config"):
        about = about.section("text_config").section("hf_model_config_kwargs")
    width = checkpoint.tensors[bert_config.WORDS].shape[-1] if bert_config.WORDS in checkpoint.tensors else 0
    heads = {"num_attention_heads": _CLIP_SIZE[1]} if width == _CLIP_SIZE[0] else {}
    read = dataclasses.replace(checkpoint, about=Options({**heads, **about.values}, about.where))
    return bert_config.translated(read, gate_act=about.text("hidden_act", "gelu"))


def clip_written(model: PreTrainedModel) -> dict[str, Any]:
    """Raises ValueError if the layout cannot store this model."""
    choices = {**bert_config.PLAIN, "gate_act": model.config.hidden_act}
    about = bert_config.written(model, "Bert", "jina-clip", **choices)
    return {**about, "mlp_type": "glu", "emb_pooler": model.config.emb_pooler}


def written(model: PreTrainedModel, *, layout: str, **choices: object) -> dict[str, Any]:
    """Raises ValueError if the layout cannot store this model."""
    config, about = model.config, bert_config.written(model, "JinaBert", layout, **choices)
    kind = next(kind for kind, activation in GATES.items() if activation == config.gate_act)
    return {**about, "position_embedding_type": "alibi", "feed_forward_type": kind, "emb_pooler": config.emb_pooler}


FAMILY = dataclasses.replace(
    mosaic.FAMILY,
    name="Jina v2",
    marks=("mlp.gated_layers.weight",),
    parts=lambda _: QKV,
    repositories=("jina-bert", "jina-embeddings-v2", "jina-reranker-v1", "jina-colbert-v1"),
    classes=("jinabert",),
    signs={"position_embedding_type": ("alibi",), "feed_forward_type": tuple(GATES)},
    config=functools.partial(config, **bert_config.PLAIN),
    written=functools.partial(written, layout="jina", **bert_config.PLAIN),
)
CODE_FAMILY = dataclasses.replace(
    FAMILY,
    name="Jina v2 code",
    marks=("mlp.up_gated_layer.weight",),
    parts=lambda _: _CODE_PARTS,
    config=functools.partial(config, **CODE),
    written=functools.partial(written, layout="jina-code", **CODE),
)
CLIP_FAMILY = dataclasses.replace(
    mosaic.FAMILY,
    name="Jina CLIP v1's text tower",
    marks=("mlp.gated_layers.weight",),
    layers="encoder.layers.",
    wrappers=(*bert_config.PREFIXES, "text_model.transformer."),
    outside={"embeddings.LayerNorm": Source(("emb_ln",))},
    parts=lambda _: _CLIP_PARTS,
    repositories=(),
    classes=("jinaclip",),
    signs={},
    config=clip_config,
    written=clip_written,
)
