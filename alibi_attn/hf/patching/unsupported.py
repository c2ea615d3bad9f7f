"""Explains why `patch` rejects a model that appears to use ALiBi but does not, or that runs remote code.

Jina v2, MosaicBERT and DNABERT-2 have model_type "bert". Without their remote code, transformers silently loads them as its own
BERT, with random position embeddings and without their feed-forwards. Their remote code no longer runs on transformers 5.
"""

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from alibi_attn.hf.readers import checkpoint, checkpoint_files
from alibi_attn.hf.readers.encoder.heads import HEADS
from alibi_attn.hf.readers.families import DECODERS, ENCODERS, PATCHED

_PLAIN_BERT = "transformers.models.bert.modeling_bert"
_REMOTE = "transformers_modules"
_ENCODER = "alibi_attn.hf.ALiBiBert"
_DECODER = "alibi_attn.hf.ALiBiForCausalLM"


def readable() -> str:
    """Which checkpoints load as our own models, in one sentence."""
    decoders, encoders = (", ".join(family.name for family in families) for families in (DECODERS, ENCODERS.values()))
    return f"checkpoints of {decoders} load as {_DECODER}, and encoders ({encoders}) as {_ENCODER}Model"


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot be patched, and what to load instead; None if no reason is known."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__.split(".")[0] == _REMOTE and (instead := _instead(kind.__name__.lower())) is not None:
            use = f"{instead}{_head(type(model))}" if instead == _ENCODER else instead
            patchable = instead.startswith("transformers")
            advice = "then patch that model" if patchable else "which needs no remote code and no patch"
            name = type(model).__name__
            return f"{name} is remote code, which cannot be patched; use {use}.from_pretrained(...), {advice}"
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


def _instead(name: str) -> str | None:
    """What to load instead of a remote class, whose name is in lower case."""
    known = {
        **dict.fromkeys((prefix for family in ENCODERS.values() for prefix in family.classes), _ENCODER),
        **dict.fromkeys((prefix for family in DECODERS for prefix in family.classes), _DECODER),
        **{prefix: f"transformers.{family.instead}" for family in PATCHED for prefix in family.classes},
    }
    return next((instead for prefix, instead in known.items() if name.startswith(prefix)), None)


def _head(kind: type) -> str:
    """The end of the name of our class with the same head."""
    heads = (head.__name__.removeprefix("ALiBiBert") for head in HEADS.values())
    return next((head for head in heads if kind.__name__.endswith(head)), "Model")


def _sign(config: object) -> str | None:
    """The evidence that a checkpoint uses ALiBi, in its config or in the names of its weights; else None."""
    families = ENCODERS.values()
    for name, signs in (sign for family in families for sign in family.signs.items()):
        if (value := getattr(config, name, None)) is not None and (not signs or value in signs):
            return f"its config has {name} {value!r}"
    auto_map = str(getattr(config, "auto_map", None) or "").lower()
    names = [name for family in families for name in family.repositories]
    if any(name in auto_map for name in names):
        return "its config's auto_map names a family with ALiBi"
    path = str(getattr(config, "_name_or_path", None) or "")
    if path and Path(path).is_dir():
        return _sign_in_weights(Path(path))
    return "its name is that of a family with ALiBi" if any(name in path.lower() for name in names) else None


def _sign_in_weights(folder: Path) -> str | None:
    try:
        names = checkpoint_files.read_state(folder, data=False).keys()
    except (OSError, ValueError):  # no checkpoint: there is nothing to report
        return None
    if checkpoint.recognized(names, ENCODERS.values()) is None or any("position_embeddings" in name for name in names):
        return None
    return f"the weights in {folder} have the names of a family with ALiBi"
