"""MosaicBERT and DNABERT-2: our weight names; queries, keys and values in one matrix; GELU in the gates.

They are recognized by the names of their weights, since both have model_type "bert", and DNABERT-2's config even has
position_embedding_type "absolute".
Source: Portes et al. 2023, MosaicBERT (arXiv:2312.17482); Zhou et al. 2023, DNABERT-2 (arXiv:2306.15006).
"""

import dataclasses
import functools
from typing import Any

from transformers import PreTrainedModel

from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.hf.readers.families import bert_config
from alibi_attn.hf.readers.families.family import Family


def written(model: PreTrainedModel) -> dict[str, Any]:
    """Raises ValueError if the layout cannot store this model."""
    about = bert_config.written(model, "Bert", "mosaic", **bert_config.PLAIN)
    if model.config.gate_act != "gelu":
        raise ValueError(
            f"layout 'mosaic' has GELU in its gates but gate_act is {model.config.gate_act!r}; pass layout='jina'"
        )
    return {**about, "alibi_starting_size": model.config.max_position_embeddings}


FAMILY = Family(
    name="MosaicBERT or DNABERT-2",
    model_types=(),
    marks=("attention.self.Wqkv.weight",),
    layers="encoder.layer.",
    own_layers="encoder.layer.",
    wrappers=bert_config.PREFIXES,
    outside={},
    parts=lambda _: {},
    aliases=bert_config.ALIASES,
    heads=bert_config.HEADS,
    ignored=bert_config.BUFFERS,
    repositories=("bert_layers", "mosaic-bert", "mosaicbert", "dnabert"),
    classes=("bertunpad",),
    signs={"alibi_starting_size": ()},
    config=functools.partial(bert_config.translated, gate_act="gelu"),
    written=written,
)
# Folders written by `save_pretrained` have the same names.
OWN = dataclasses.replace(
    FAMILY, name="ALiBiBert", model_types=(ALiBiBertConfig.model_type,), config=bert_config.own_config, written=None
)
