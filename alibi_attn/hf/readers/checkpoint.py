"""Reads and writes the checkpoints of all model families: finds the family by the weights' names, and renames the weights.

The config must agree with the family and with all sizes, and no weight of the model's body may be missing or unexpected. Weights
outside the body are a head, which is loaded if the class has it, otherwise logged and ignored. Weights that already have our
layout are not copied unless `copies=True`. Read before: `families/family.py`; next: `checkpoint_files.py`.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from alibi_attn.files import check_new, new_folder
from alibi_attn.hf.readers import checkpoint_files
from alibi_attn.hf.readers.families.family import Checkpoint, Family, Options, Source

ONE_SOURCE = "its config.json and weights must come from one checkpoint"
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Match:
    """The family of a checkpoint.

    Args:
        names: {stored name: the family's name, without wrapper prefixes}.
        heads: the family's names of weights outside the prefix that all stored names of the body have; None without a prefix.
    """

    family: Family
    names: dict[str, str]
    heads: frozenset[str] | None


def read(
    folder: Path,
    about: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    families: Iterable[Family],
    *,
    changes: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedConfig, Checkpoint]:
    """Our config for a checkpoint, and its weights.

    Args:
        folder: for errors.
        about, tensors: its config.json, and its weights.
        families: the candidates; the first that matches is used.
        changes: fields of the config to change, by the family's names.

    Raises:
        ValueError: an unknown family, or an unsupported config.
    """
    kind = about.get("model_type")
    table = [family for family in families if kind in family.model_types or not family.is_typed]
    if any("embeddings.position_embeddings." in name for name in tensors):
        raise ValueError(f"{folder} has position embeddings, so it does not use ALiBi; transformers may have its class")
    match = recognized(tensors.keys(), table)
    if match is None:
        raise ValueError(
            f"{folder} does not hold a checkpoint of {', '.join(family.name for family in table)}: no weight is called "
            f"{', '.join(f'{family.layers}0.{family.marks[0]}' for family in table)}; the weights are {listed(tensors, 3)}"
        )
    family, weights = match.family, {name: tensors[stored] for stored, name in match.names.items()}
    for name, alias in family.aliases.items():
        if alias in weights:
            weights.setdefault(name, weights.pop(alias))
    if kind is not None and family.model_types and kind not in family.model_types:
        raise ValueError(
            f"the weights in {folder} have the names of {family.name}, whose model_type is {' or '.join(family.model_types)}, "
            f"but its config says {kind!r}; the config and the weights are of different models"
        )
    for name, tensor in weights.items():
        if not (tensor.is_floating_point() or name in (match.heads or ()) or re.fullmatch(family.ignored, name)):
            raise ValueError(f"{folder} holds {name} as {tensor.dtype}: quantized weights are not supported")
    options = Options(about, str(folder / checkpoint_files.CONFIG))
    state = Checkpoint(folder, options, weights, family, family.parts(weights.keys()), changes or {}, match.heads)
    try:
        config = family.config(state)
    except StrictDataclassError as error:
        raise ValueError(f"{options.where} is invalid: {cause(error)}; correct it, or download it again") from error
    _check_sizes(config, state)
    return config, state


def recognized(names: Collection[str], families: Iterable[Family]) -> Match | None:
    """The first family that matches these names."""
    table = list(families)
    for outer in dict.fromkeys(outer for family in table for outer in family.wrappers):
        for family in table:
            for inner in dict.fromkeys(("", family.body)):  # a model without its head is saved without the body's name
                first = outer + f"{family.layers}0.".removeprefix(inner)
                if outer in family.wrappers and any(first + mark in names for mark in family.marks):
                    prefix = outer + family.body.removeprefix(inner)
                    body = {name: inner + name.removeprefix(outer) for name in names if name.startswith(prefix)}
                    others = {name: name.removeprefix(outer) for name in names if name not in body}
                    heads = frozenset(others.values()) - set(body.values()) if prefix else None
                    return Match(family, others | body, heads)
    return None


def converted(
    model: PreTrainedModel,
    state: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    new_head: bool = False,
    copies: bool = False,
) -> dict[str, Tensor]:
    """The weights by our model's names. They are removed from `state` one by one, so that few are in memory twice. Heads remain.

    Args:
        model: gives names and sizes; may be on the meta device.
        dtype: of the result; None keeps the checkpoint's dtype.
        new_head: leave out weights of the head that are missing from the checkpoint, or that have another number of labels.
        copies: copy every tensor, so that none shares memory with the checkpoint.

    Raises:
        ValueError: weights that are missing, unexpected or of the wrong size; the message names them.
    """
    prefix, wanted = f"{model.base_model_prefix}.", dict(model.state_dict())
    tied = (model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    for name, embedding in tied.items():
        del wanted[name]
        _check_tied(state, name, embedding.removeprefix(prefix))
    stored = {name: state.family.places(name.removeprefix(prefix), state.parts) for name in wanted}
    _check_names({their for _, theirs in stored.values() for their in theirs}, state, new_head=new_head)
    weights = {}
    for name, like in wanted.items():
        source, theirs = stored[name]
        missing = any(their not in state.tensors for their in theirs)
        if missing or (new_head and name.startswith("classifier.") and state.tensors[theirs[0]].shape != like.shape):
            continue  # part of a new head; `_check_names` raises an error for all others
        tensor = _taken(state, source, theirs, like.shape).to(dtype)
        weights[name] = tensor.clone() if copies and len(theirs) == 1 else tensor
        for their in theirs:
            if source.half != 0:  # the second half is still needed
                state.tensors.pop(their, None)
    return weights | {name: weights[embedding] for name, embedding in tied.items()}


def write(model: PreTrainedModel, folder: Path, family: Family) -> None:
    """Write config.json and model.safetensors in a family's layout into a new folder, atomically.

    Raises:
        ValueError: the layout cannot store this model.
        FileExistsError: the folder exists.
    """
    assert family.written is not None
    about = family.written(model)
    check_new(folder)
    tied = (model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue  # safetensors cannot store a tensor under two names
        prefix = f"{model.base_model_prefix}." if name.startswith(f"{model.base_model_prefix}.") else ""
        source, theirs = family.places(name.removeprefix(prefix), family.parts(()))
        assert not source.transposed
        assert source.half is None
        parts = tensor.detach().cpu().chunk(len(theirs))
        tensors |= {prefix + their: part.contiguous() for their, part in zip(theirs, parts, strict=True)}
    with new_folder(folder) as temporary:
        save_file(tensors, temporary / checkpoint_files.SAFE, metadata={"format": "pt"})
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        (temporary / checkpoint_files.CONFIG).write_text(text, encoding="utf-8")


def cause(error: BaseException) -> str:
    """The message that transformers wraps when a config is invalid."""
    inner = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ is not None else error
    return " ".join(str(inner).split())


def check_layers(folder: Path, config: PreTrainedConfig, counted: int) -> None:
    """Raises ValueError unless the config has as many layers as the weights."""
    if counted != config.num_hidden_layers:
        raise ValueError(f"{folder} has {counted} layers but its config says {config.num_hidden_layers}; {ONE_SOURCE}")


def log_heads(folder: Path, names: Collection[str]) -> None:
    """Logs the weights of a head that the class does not have."""
    if names:
        _LOG.warning("%s has weights of another head, which are ignored: %s", folder, listed(names))


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names in sorted order, and the number of the remaining ones."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_names(wanted: set[str], state: Checkpoint, *, new_head: bool) -> None:
    """Raises ValueError if weights are missing, or unexpected in the body. Logs the heads that the class does not have."""
    family = state.family

    def is_head(name: str) -> bool:
        return name in (state.heads or ()) or bool(re.fullmatch(family.heads, name))

    missing = {name for name in wanted - state.tensors.keys() if not (new_head and is_head(name))}
    others = {name for name in state.tensors.keys() - wanted if not re.fullmatch(family.ignored, name)}
    unknown = {name for name in others if not is_head(name)}
    if missing or unknown:
        modules = {name.partition(".")[0] for name in wanted}
        advice = ONE_SOURCE
        if not unknown and all(map(is_head, missing)):
            advice = "pass new_head=True to draw the head at random, and train it"
        elif state.heads is None and not missing and modules.isdisjoint(name.partition(".")[0] for name in unknown):
            advice = "if they are a head, remove them: without a prefix of all other names, such as bert., it is not recognized"
        absent, extra = f"the weights {listed(missing)} are missing", f"it has unexpected weights {listed(unknown)}"
        reason = f"{absent}, and {extra}" if missing and unknown else absent if missing else extra
        raise ValueError(f"{state.folder} is not the {family.name} that its config describes: {reason}; {advice}")
    log_heads(state.folder, others)


def _check_sizes(config: PreTrainedConfig, state: Checkpoint) -> None:
    """Compares the config's sizes with the weights, before a model of these sizes is built."""
    layers = re.compile(re.escape(state.family.layers) + r"(\d+)\.")
    counted = len({match[1] for name in state.tensors if (match := layers.match(name))})
    check_layers(state.folder, config, counted)
    longest = max(max(tensor.shape, default=0) for tensor in state.tensors.values())
    for name in ("vocab_size", "hidden_size", "intermediate_size", "type_vocab_size"):
        if (size := getattr(config, name, 0)) > longest:
            raise ValueError(f"{state.folder} has {name} {size} in its config but no weight that long; {ONE_SOURCE}")


def _check_tied(state: Checkpoint, head: str, embedding: str) -> None:
    """Checks a head that is stored although the config ties it to the embeddings: both must be equal."""
    (name,), (other,) = (state.family.places(ours, state.parts)[1] for ours in (head, embedding))
    stored, shared = state.tensors.pop(name, None), state.tensors.get(other)
    if stored is None or shared is None or stored.data_ptr() == shared.data_ptr() or torch.equal(stored, shared):
        return
    raise ValueError(
        f"{state.folder} has tie_word_embeddings but {name} is not {other}; set tie_word_embeddings to false in its config.json "
        "if the head was trained separately"
    )


def _taken(state: Checkpoint, source: Source, theirs: tuple[str, ...], shape: torch.Size) -> Tensor:
    """One of our tensors; a view of the stored one if the layout is the same."""
    parts = [state.tensors[their] for their in theirs]
    fits = all(part.ndim == len(shape) for part in parts)
    if fits and source.transposed:
        parts = [part.mT if part.ndim == 2 else part for part in parts]
    if fits and (half := source.half) is not None:
        rows = parts[0].shape[0] // 2
        fits = parts[0].shape[0] == 2 * rows
        parts = [parts[0][half * rows : (half + 1) * rows]]
    size = [sum(part.shape[0] for part in parts), *parts[0].shape[1:]] if fits else None
    if size != list(shape) or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        had = ", ".join(f"{their} {list(state.tensors[their].shape)}" for their in theirs)
        needed = [*reversed(shape)] if source.transposed else [*shape]
        needed = [2 * needed[0], *needed[1:]] if source.half is not None else needed
        raise ValueError(
            f"{state.folder} has {had} where its config needs {needed}{' in all' * (len(theirs) > 1)}; {ONE_SOURCE}"
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
