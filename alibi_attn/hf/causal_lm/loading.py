"""Checkpoints of other people as our decoder: which family it is, what its weights are called here, and that none is left over.

The family is found by the names of the weights; the config must agree with it and with all sizes. Weights whose layout is ours
are taken as they are, without a copy; of the others one at a time is copied. Read next: `family.py`.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from alibi_attn.hf import checkpoints
from alibi_attn.hf.causal_lm import baichuan, cerebras, foundry, refact
from alibi_attn.hf.causal_lm.config import ALiBiCausalLMConfig
from alibi_attn.hf.causal_lm.family import Checkpoint, Family, Options, Parts, Source

FAMILIES = (baichuan.FAMILY, cerebras.FAMILY, foundry.FAMILY, refact.FAMILY)
PATCHED = ("bloom", "falcon")  # model types that transformers builds
OUTER = ("", "module.", "model.", "module.model.")  # what wrappers put before all names
GENERATION = "generation_config.json"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


class State:
    """The weights of a checkpoint by their names without a prefix, taken one after another.

    Args:
        tensors: what is still there.
        family, parts: how they are called.
        folder: for errors.
    """

    def __init__(self, tensors: dict[str, Tensor], family: Family, parts: Parts, folder: Path) -> None:
        self.tensors, self.family, self.parts, self.folder = tensors, family, parts, folder

    def places(self, name: str) -> tuple[Source, tuple[str, ...]]:
        """How one of our tensors is stored, and under which names."""
        if match := _LAYER.fullmatch(name):
            number, part, kind = match.groups()
            source, prefix = self.parts[part], f"{self.family.layers}{number}."
        else:
            part, kind = name.rsplit(".", 1)
            source, prefix = self.family.outside[part], ""
        return source, tuple(f"{prefix}{their}.{kind}" for their in source.names)


def read(
    folder: Path, about: Mapping[str, object], *, normalized_head: bool | None
) -> tuple[ALiBiCausalLMConfig, State]:
    """The config that a folder's weights have here, and the weights.

    Args:
        about: its config.json.
        normalized_head: as for `ALiBiForCausalLM.from_pretrained`.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: another family, a damaged file, or a config that is not computed here.
    """
    kind = about.get("model_type")
    if kind in PATCHED:
        raise ValueError(
            f"{folder} holds a {kind} model, which transformers builds itself: load it with AutoModelForCausalLM, then call "
            "alibi_attn.hf.patch(model)"
        )
    tensors, family = _named(folder, checkpoints.read_state(folder))
    if kind is not None and kind not in family.model_types:
        raise ValueError(
            f"the weights in {folder} have the names of {family.name}, which has {' or '.join(family.model_types)} for its "
            f"model_type, but its config says {kind!r}; that is another model, or another config"
        )
    if normalized_head is not None and family is not baichuan.FAMILY:
        raise ValueError(f"normalized_head is for Baichuan but {folder} is {family.name}; leave it out")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith(family.ignored):
            raise ValueError(f"{folder} holds {name} as {tensor.dtype}: quantized weights cannot be read here")
    options = Options(about, str(folder / checkpoints.CONFIG))
    try:
        config = family.config(Checkpoint(folder, options, tensors, normalized_head))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, about.get(name))
    except StrictDataclassError as error:
        raise ValueError(f"{options.where} cannot be right: {_cause(error)}; download the checkpoint again") from error
    state = State(tensors, family, family.parts(tensors.keys()), folder)
    _check_sizes(config, state)
    return config, state


def fill(model: PreTrainedModel, state: State, dtype: torch.dtype | str | None) -> None:
    """Put the weights into a model on the meta device; of those that are copied only one is there twice.

    Args:
        dtype: None for that of the embeddings.

    Raises:
        ValueError: weights that are missing, unknown or of another size, by name.
    """
    wanted = model.state_dict()
    tied = bool(model.config.tie_word_embeddings)
    if tied:
        _check_tied(state, wanted.pop("lm_head.weight"))
    _check_names(wanted, state)
    (embedding,) = state.places("embed_tokens.weight")[1]
    target = _dtype(dtype, state.tensors[embedding])
    found = {}
    for name, like in wanted.items():
        found[name] = _taken(state, name, like.shape).to(target)
        for their in state.places(name)[1]:
            if state.places(name)[0].half != 0:  # the second half is still to be taken
                state.tensors.pop(their, None)
    if tied:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    model.load_state_dict(found, assign=True)
    model.tie_weights()


def take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """What the folder says about `generate`, where it says anything."""
    if (folder / GENERATION).exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{folder / GENERATION} is damaged: {' '.join(str(error).split())}; download it again, or delete it"
            ) from error
    else:
        model.generation_config = GenerationConfig.from_model_config(model.config)


def choose(config: ALiBiCausalLMConfig, chosen: Mapping[str, str | None]) -> None:
    """Set what is not None.

    Raises:
        ValueError: a value that is none of those allowed.
    """
    for name, value in chosen.items():
        if value is not None:
            setattr(config, name, value)
    try:
        config.validate_architecture()
    except StrictDataclassError as error:
        raise ValueError(_cause(error)) from error


def own(
    load: Callable[..., Any],
    folder: str | os.PathLike[str],
    *args: Any,
    chosen: Mapping[str, str | None],
    **kwargs: Any,
) -> Any:
    """A folder that `save_pretrained` wrote, by transformers; weights that are missing are refused, not drawn at random.

    Args:
        load: transformers' `from_pretrained`.
        chosen: numerics and backend, or None for those of the config.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    config = kwargs.pop("config", None)
    try:
        if not isinstance(config, ALiBiCausalLMConfig):
            config = ALiBiCausalLMConfig.from_pretrained(folder)
        choose(config, chosen)
        model, info = load(folder, *args, config=config, output_loading_info=True, **kwargs)
    except (SafetensorError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder} is damaged: {_cause(error)}; save or download it again") from error
    for kind, wrong in (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"])):
        if wrong:
            raise ValueError(f"{folder} {kind} weights: {_some(wrong)}; save or download it again")
    return (model, info) if wants_info else model


def _named(folder: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Family]:
    """The weights without the prefix of a wrapper, and their family."""
    for outer in OUTER:
        for family in FAMILIES:
            for inner in ("", family.body):  # a model without its head is saved without the body's name
                first = f"{family.layers}0."
                if any(outer + first.removeprefix(inner) + mark in tensors for mark in family.marks):
                    return {_renamed(name, outer, inner): tensor for name, tensor in tensors.items()}, family
    raise ValueError(
        f"{folder} holds none of {', '.join(family.name for family in FAMILIES)}: no weights are called "
        f"{', '.join(f'{family.layers}0.{family.marks[0]}' for family in FAMILIES)}; it has {_some(tensors)}"
    )


def _renamed(name: str, outer: str, inner: str) -> str:
    """Names that do not begin as the others keep what they have, and are refused as unknown."""
    return inner + name.removeprefix(outer) if name.startswith(outer) else name


def _check_names(wanted: Mapping[str, Tensor], state: State) -> None:
    theirs = {their for name in wanted for their in state.places(name)[1]}
    missing = theirs - state.tensors.keys()
    unknown = {name for name in state.tensors.keys() - theirs if not name.endswith(state.family.ignored)}
    if missing or unknown:
        raise ValueError(
            f"{state.folder} is no {state.family.name} that its config describes: it lacks the weights {_some(missing)} and has "
            f"unknown {_some(unknown)}; download the checkpoint again"
        )


def _check_sizes(config: ALiBiCausalLMConfig, state: State) -> None:
    """What a model is built from, before it is."""
    layers = re.compile(re.escape(state.family.layers) + r"(\d+)\.")
    counted = len({match[1] for name in state.tensors if (match := layers.match(name))})
    if counted != config.num_hidden_layers:
        raise ValueError(
            f"{state.folder} has {counted} layers but its config says {config.num_hidden_layers}; download the checkpoint again"
        )
    longest = max(max(tensor.shape, default=0) for tensor in state.tensors.values())
    for name in ("vocab_size", "hidden_size", "intermediate_size"):
        if (size := getattr(config, name)) > longest:
            raise ValueError(
                f"{state.folder} has no weight as long as the {name} that its config gives, {size}; download the checkpoint again"
            )


def _check_tied(state: State, like: Tensor) -> None:
    """A head that is stored although it is the embeddings."""
    head = state.tensors.pop("lm_head.weight", None)
    (embedding,) = state.places("embed_tokens.weight")[1]
    other = state.tensors.get(embedding)
    if head is not None and other is not None and head.data_ptr() != other.data_ptr() and not torch.equal(head, other):
        raise ValueError(
            f"{state.folder} has tie_word_embeddings but lm_head.weight is not {embedding}; set tie_word_embeddings to false in "
            "its config.json if the head was trained on its own"
        )


def _taken(state: State, name: str, shape: torch.Size) -> Tensor:
    """One of our tensors; a view of theirs where the layout is ours."""
    source, theirs = state.places(name)
    parts = [state.tensors[their] for their in theirs]
    flat = all(part.ndim == len(shape) for part in parts)
    if flat and source.transposed:
        parts = [part.mT if part.ndim == 2 else part for part in parts]
    if flat and source.half is not None:
        rows = parts[0].shape[0] // 2
        flat = parts[0].shape[0] == 2 * rows
        parts = [parts[0][source.half * rows : (source.half + 1) * rows]]
    size = [sum(part.shape[0] for part in parts), *parts[0].shape[1:]] if flat else None
    if size != list(shape) or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        had = ", ".join(f"{their} {list(state.tensors[their].shape)}" for their in theirs)
        needed = [*reversed(shape)] if source.transposed else [*shape]
        needed = [2 * needed[0], *needed[1:]] if source.half is not None else needed
        raise ValueError(
            f"{state.folder} has {had} where its config needs {needed}{' in all' * (len(theirs) > 1)}; download it again"
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _dtype(dtype: torch.dtype | str | None, embedding: Tensor) -> torch.dtype:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is None:
        return embedding.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f'dtype is {dtype!r} but must be a floating dtype of torch, or "auto"')
    return dtype


def _some(names: Mapping[str, object] | set[str]) -> str:
    shown = sorted(names)[:3]
    return f"{', '.join(shown) or 'none'}{f' and {len(names) - 3} more' * (len(names) > 3)}"


def _cause(error: BaseException) -> str:
    """The sentence inside of what transformers wraps around an error of a config."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ is not None else error
    return " ".join(str(cause).split())
