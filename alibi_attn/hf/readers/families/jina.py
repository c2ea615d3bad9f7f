"""Jina embeddings v2 and its code model: queries, keys and values in three matrices; the config names the gated unit.

The code model normalizes queries and keys, activates the second half of its gated layer, and has one more norm per layer.
Source: Günther et al. 2023, Jina Embeddings 2 (arXiv:2310.19923).
"""

import dataclasses
import functools
from typing import Any

from transformers import PreTrainedModel

from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families import bert_config, mosaic
from alibi_attn.hf.readers.families.family import Checkpoint, Source

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


def config(checkpoint: Checkpoint, *, is_code: bool) -> ALiBiBertConfig:
    """Raises ValueError for a gated unit that is neither of the two."""
    kind = checkpoint.about.values.get("feed_forward_type")
    if not isinstance(kind, str) or kind not in GATES:
        raise ValueError(f"{checkpoint.about.where} has feed_forward_type {kind!r} but must have 'geglu' or 'reglu'")
    gated = f"encoder.layer.0.mlp.{'up_gated_layer' if is_code else 'gated_layers'}.weight"
    qkv_bias = "encoder.layer.0.attention.self.query.bias" in checkpoint.state
    fields = CODE if is_code else PLAIN
    return bert_config.translated(checkpoint, gated=gated, gate_act=GATES[kind], qkv_bias=qkv_bias, **fields)


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
    repositories=("jina-bert", "jina-embeddings-v2", "jina-reranker-v1"),
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
