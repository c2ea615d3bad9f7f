"""Explains why `patch` rejects a model that appears to use ALiBi but does not, or that runs remote code.

Jina v2, MosaicBERT and DNABERT-2 have model_type "bert". Without their remote code, transformers silently loads them as its own
BERT, with random position embeddings and without their feed-forwards. Their remote code no longer runs on transformers 5.
"""

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from alibi_attn.hf.readers import checkpoint, checkpoint_files
from alibi_attn.hf.readers.families import ENCODERS

_PLAIN_BERT = "transformers.models.bert.modeling_bert"
_REMOTE = "transformers_modules"
# Parts of the names of these families' repositories and files, in an auto_map or a path.
_FAMILIES = (
    "jina-bert", "jina-embeddings-v2", "jina-reranker-v1", "bert_layers", "mosaic-bert", "mosaicbert", "dnabert",
)  # fmt: skip
# Fields of their configs, with the values that indicate ALiBi; () for any value.
_SIGNS = {"position_embedding_type": ("alibi",), "alibi_starting_size": (), "feed_forward_type": ("geglu", "reglu")}
_ENCODER = "alibi_attn.hf.ALiBiBert"
_DECODER = "alibi_attn.hf.ALiBiForCausalLM"
# Prefixes of the names of remote classes, in lower case, and the class to load instead.
_INSTEAD = {
    "jinabert": _ENCODER,
    "bertunpad": _ENCODER,
    "baichuan": _DECODER,
    "btlm": _DECODER,
    "jais": _DECODER,
    "mptforcausallm": _DECODER,
    "mptmodel": _DECODER,
    "rwforcausallm": "transformers.FalconForCausalLM",
    "rwmodel": "transformers.FalconForCausalLM",
}


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot be patched, and what to load instead; None if no reason is known."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__.split(".")[0] == _REMOTE:
            for prefix, instead in _INSTEAD.items():
                if kind.__name__.lower().startswith(prefix):
                    return _remote(model, instead)
        is_bert = isinstance(module, PreTrainedModel) and any(base.__module__ == _PLAIN_BERT for base in kind.__mro__)
        if is_bert and (sign := _sign(module.config)) is not None:
            path = getattr(module.config, "_name_or_path", "") or "folder_or_id"
            return (
                f"this {kind.__name__} was loaded without ALiBi: {sign}, but transformers built a plain BERT from it, with "
                f"random weights; use {_ENCODER}{_head(kind)}.from_pretrained({path!r})"
            )
    return None


def needs_none(model: nn.Module) -> str | None:
    """The message for our own models, which need no patch; else None."""
    if any(type(module).__module__.startswith("alibi_attn.") for module in model.modules()):
        return f"{type(model).__name__} computes its attention with alibi_attention already; there is nothing to patch"
    return None


def _remote(model: nn.Module, instead: str) -> str:
    use = f"{instead}{_head(type(model))}" if instead == _ENCODER else instead
    patchable = instead.startswith("transformers")
    advice = "then patch that model" if patchable else "which needs no remote code and no patch"
    return f"{type(model).__name__} is remote code, which cannot be patched; use {use}.from_pretrained(...), {advice}"


def _head(kind: type) -> str:
    """The end of the name of our class with the same head."""
    return next(
        (head for head in ("ForMaskedLM", "ForSequenceClassification") if kind.__name__.endswith(head)), "Model"
    )


def _sign(config: object) -> str | None:
    """The evidence that a checkpoint uses ALiBi, in its config or in the names of its weights; else None."""
    for name, signs in _SIGNS.items():
        if (value := getattr(config, name, None)) is not None and (not signs or value in signs):
            return f"its config has {name} {value!r}"
    auto_map = str(getattr(config, "auto_map", None) or "").lower()
    if any(family in auto_map for family in _FAMILIES):
        return "its config's auto_map names a family with ALiBi"
    path = str(getattr(config, "_name_or_path", None) or "")
    if path and Path(path).is_dir():
        return _sign_in_weights(Path(path))
    return "its name is that of a family with ALiBi" if any(family in path.lower() for family in _FAMILIES) else None


def _sign_in_weights(folder: Path) -> str | None:
    try:
        names = checkpoint_files.read_names(folder)
    except (OSError, ValueError):  # no checkpoint: there is nothing to report
        return None
    if checkpoint.recognized(names, ENCODERS.values()) is None or any("position_embeddings" in name for name in names):
        return None
    return f"the weights in {folder} have the names of a family with ALiBi"
