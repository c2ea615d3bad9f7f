"""The key names of the originals, and which family a checkpoint is of: by the names of its weights, since configs lie.

A name of ours is MosaicBERT's; each stands for one name of theirs, or for three whose rows follow one another (queries, keys and
values). DNABERT-2 has MosaicBERT's names and a config that says "absolute"; all of them say model_type "bert".
"""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from alibi_attn.hf.bert.config import Layout

PREFIXES = ("", "bert.", "model.")
WORDS = "embeddings.word_embeddings.weight"
# Buffers that some versions of the originals saved; nothing is read from them.
BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)|encoder\.alibi")
HEADS = ("cls.", "classifier.")
POOLER = "pooler."

_CODE_NAMES = {
    "mlp.gated_layers.": "mlp.up_gated_layer.",
    "mlp.wo.": "mlp.down_layer.",
    "mlp.layernorm.": "layer_norm_2.",
}


def their_names(ours: str, layout: Layout) -> tuple[str, ...]:
    """What a weight of ours is called in an original layout, without the prefix of the bare model.

    >>> their_names("encoder.layer.0.attention.self.Wqkv.bias", "jina")[1]
    'encoder.layer.0.attention.self.key.bias'
    """
    if layout == "mosaic":
        return (ours,)
    if ".Wqkv." in ours:
        return tuple(ours.replace("Wqkv", part) for part in ("query", "key", "value"))
    if layout == "jina-code":
        for name, theirs in _CODE_NAMES.items():
            ours = ours.replace(name, theirs)
    return (ours,)


def prefix_of(names: Iterable[str]) -> str:
    """The prefix before the names of the bare model.

    Raises:
        ValueError: none of the known ones, or more than one.
    """
    names = set(names)
    found = [prefix for prefix in PREFIXES if prefix + WORDS in names]
    if len(found) != 1:
        known = ", ".join(repr(prefix) for prefix in PREFIXES)
        what = "more than one" if found else "none"
        raise ValueError(
            f"it has {what} of the prefixes {known} before {WORDS}, and is no encoder of the known families (Jina v2, "
            "MosaicBERT, DNABERT-2); for decoders there are ALiBiForCausalLM, and patch"
        )
    return found[0]


def layout_of(names: Iterable[str]) -> Layout:
    """The family of a bare model's weights, by their names without prefix.

    Raises:
        ValueError: another architecture, with what it looks like.
    """
    names = set(names)

    def has(part: str) -> bool:
        return any(part in name for name in names)

    if has("embeddings.position_embeddings."):
        raise ValueError(
            "it has position embeddings, so it has no ALiBi; transformers' own BertModel may be what it is for"
        )
    if has(".attention.self.Wqkv.") and has(".mlp.gated_layers."):
        return "mosaic"
    if has(".attention.self.query.") and has(".mlp.up_gated_layer."):
        return "jina-code"
    if has(".attention.self.query.") and has(".mlp.gated_layers."):
        return "jina"
    raise ValueError(
        "its layers are none of the known ones, which have attention.self.Wqkv with mlp.gated_layers (MosaicBERT, DNABERT-2), "
        "attention.self.query with mlp.gated_layers (Jina v2), or with mlp.up_gated_layer (Jina v2 code)"
    )


def number_of_layers(names: Iterable[str]) -> int:
    """Layers, where they are numbered from 0 without a gap.

    Raises:
        ValueError: a gap.
    """
    found = {int(match[1]) for name in names if (match := re.match(r"encoder\.layer\.(\d{1,5})\.", name))}
    if found != set(range(len(found))):
        lacking = min(set(range(len(found))) - found)
        raise ValueError(f"it has {len(found)} layers but none with the number {lacking}")
    return len(found)


def head_aliases(ours: str) -> tuple[str, ...]:
    """Other names that a head's weight has in some checkpoints, in the order of preference."""
    return ("cls.predictions.bias",) if ours == "cls.predictions.decoder.bias" else ()


def split(ours: str, tensor: Tensor, layout: Layout) -> Mapping[str, Tensor]:
    """A weight of ours under their names; the inverse of stacking the rows."""
    names = their_names(ours, layout)
    return dict(zip(names, tensor.chunk(len(names)), strict=True))
