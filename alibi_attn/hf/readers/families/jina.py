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
CODE = {"gate": "second", "qk_norm": True, "extra_norm": True}
PLAIN = {"gate": "first", "qk_norm": False, "extra_norm": False}
_QKV = {"attention.self.Wqkv": Source(tuple(f"attention.self.{part}" for part in ("query", "key", "value")))}
_CODE_PARTS = {
    **_QKV,
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


def config(checkpoint: Checkpoint, *, is_code: bool) -> ALiBiBertConfig:
    """Raises ValueError for a gated unit that is neither of the two."""
    kind = checkpoint.about.values.get("feed_forward_type")
    if not isinstance(kind, str) or kind not in GATES:
        raise ValueError(f"{checkpoint.about.where} has feed_forward_type {kind!r} but must have 'geglu' or 'reglu'")
    gated = f"encoder.layer.0.mlp.{'up_gated_layer' if is_code else 'gated_layers'}.weight"
    qkv_bias = "encoder.layer.0.attention.self.query.bias" in checkpoint.state
    fields = CODE if is_code else PLAIN
    return bert_config.translated(checkpoint, gated=gated, gate_act=GATES[kind], qkv_bias=qkv_bias, **fields)


def clip_config(checkpoint: Checkpoint) -> ALiBiBertConfig:
    """Reads the config of a CLIP, or of its text tower alone."""
    about, first = checkpoint.about, "encoder.layers.0"
    if about.has("text_config"):
        about = about.section("text_config").section("hf_model_config_kwargs")
    width = checkpoint.state[bert_config.WORDS].shape[-1] if bert_config.WORDS in checkpoint.state else 0
    heads = {"num_attention_heads": _CLIP_SIZE[1]} if width == _CLIP_SIZE[0] else {}
    return bert_config.translated(
        dataclasses.replace(checkpoint, about=Options({**heads, **about.values}, about.where)),
        gated=f"{first}.mlp.gated_layers.weight",
        gate_act=about.text("hidden_act", "gelu"),
        qkv_bias=f"{first}.mixer.Wqkv.bias" in checkpoint.state,
    )


def clip_written(model: PreTrainedModel) -> dict[str, Any]:
    """Raises ValueError if the layout cannot store this model."""
    act = model.config.hidden_act
    bert_config.check_can_be_written(model.config, "jina-clip", **PLAIN, gate_act=act)
    return {**bert_config.written(model, "Bert"), "mlp_type": "glu", "emb_pooler": model.config.emb_pooler}


def written(model: PreTrainedModel, *, is_code: bool) -> dict[str, Any]:
    """Raises ValueError if the layout cannot store this model."""
    config = model.config
    bert_config.check_can_be_written(config, "jina-code" if is_code else "jina", **(CODE if is_code else PLAIN))
    kind = next(kind for kind, activation in GATES.items() if activation == config.gate_act)
    own = {"position_embedding_type": "alibi", "feed_forward_type": kind, "emb_pooler": config.emb_pooler}
    return {**bert_config.written(model, "JinaBert"), **own}


FAMILY = dataclasses.replace(
    mosaic.FAMILY,
    name="Jina v2",
    marks=("mlp.gated_layers.weight",),
    parts=lambda _: _QKV,
    repositories=("jina-bert", "jina-embeddings-v2", "jina-reranker-v1", "jina-colbert-v1"),
    classes=("jinabert",),
    signs={"position_embedding_type": ("alibi",), "feed_forward_type": tuple(GATES)},
    config=functools.partial(config, is_code=False),
    written=functools.partial(written, is_code=False),
)
CODE_FAMILY = dataclasses.replace(
    FAMILY,
    name="Jina v2 code",
    marks=("mlp.up_gated_layer.weight",),
    parts=lambda _: _CODE_PARTS,
    config=functools.partial(config, is_code=True),
    written=functools.partial(written, is_code=True),
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
