"""Loads the decoder: originals through `hf/readers/checkpoint.py`, folders written by `save_pretrained` through transformers."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel

from alibi_attn.hf.readers import checkpoint, checkpoint_files, folder_check
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families import DECODERS, ENCODERS, baichuan
from alibi_attn.hf.readers.families.family import Checkpoint

BUILT_BY_TRANSFORMERS = ("bloom", "falcon")  # model types that transformers builds
GENERATION = "generation_config.json"
_OTHER_WEIGHTS = {"state_dict", "variant", "subfolder", "gguf_file"}  # arguments that replace the weights of the folder


def read(
    folder: Path, about: Mapping[str, object], *, normalized_head: bool | None
) -> tuple[ALiBiCausalLMConfig, Checkpoint]:
    """Config and weights of an original.

    Args:
        about: its config.json.
        normalized_head: see `ALiBiForCausalLM.from_pretrained`.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: a damaged file, or see `checkpoint.read`.
    """
    kind = about.get("model_type")
    if kind in BUILT_BY_TRANSFORMERS:
        raise ValueError(
            f"{folder} holds a {kind} model, which transformers supports: load it with AutoModelForCausalLM, then call "
            "alibi_attn.hf.patch(model)"
        )
    if kind == "gpt2" and about.get("position_embedding_type") != "alibi":
        raise ValueError(
            f"{folder} is not supported: GPT-2 has learned positions (its position_embedding_type is not alibi); load it with "
            "transformers, convert it with alibi_attn.hf.to_alibi and train it"
        )
    tensors = checkpoint_files.read_state(folder)
    encoder = checkpoint.recognized(tensors.keys(), ENCODERS.values())
    if encoder is not None and checkpoint.recognized(tensors.keys(), DECODERS) is None:
        raise ValueError(
            f"{folder} holds an encoder ({encoder.family.name}), which predicts no next tokens; embed texts with it: alibi "
            "embed, or alibi_attn.hf.ALiBiBertModel"
        )
    changes = {} if normalized_head is None else {"normalized_head": normalized_head}
    config, state = checkpoint.read(folder, about, tensors, DECODERS, changes=changes)
    assert isinstance(config, ALiBiCausalLMConfig)
    config.source = config.source or state.family.name
    if changes and state.family is not baichuan.FAMILY:
        raise ValueError(f"normalized_head is only for Baichuan but {folder} is {state.family.name}; omit it")
    return config, state


def fill(model: PreTrainedModel, state: Checkpoint, dtype: torch.dtype | str | None) -> None:
    """Put the weights into a model on the meta device.

    Args:
        dtype: None for the embeddings' dtype.

    Raises:
        ValueError: see `checkpoint.converted`.
    """
    target = state.dtype_of("embed_tokens.weight") if dtype is None else _dtype(dtype)
    model.load_state_dict(checkpoint.converted(model, state, dtype=target), assign=True)
    model.tie_weights()


def take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Copy the settings for `generate` from the folder, if it has any."""
    if (folder / GENERATION).exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{folder / GENERATION} is invalid: {' '.join(str(error).split())}; correct or delete it"
            ) from error
    else:
        model.generation_config = GenerationConfig.from_model_config(model.config)


def choose(config: ALiBiCausalLMConfig, chosen: Mapping[str, str | None]) -> None:
    """Set those options that are not None.

    Raises:
        ValueError: a value that is not allowed.
    """
    for name, value in chosen.items():
        if value is not None:
            setattr(config, name, value)
    try:
        config.validate_architecture()
    except StrictDataclassError as error:
        raise ValueError(checkpoint.cause(error)) from error


def load_saved(
    load: Callable[..., Any],
    folder: str | os.PathLike[str],
    *args: Any,
    chosen: Mapping[str, str | None],
    **kwargs: Any,
) -> Any:
    """Load a folder written by `save_pretrained` through transformers. Missing weights raise instead of being initialized.

    Args:
        load: transformers' `from_pretrained`.
        chosen: numerics and backend; None for the config's values.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    config = kwargs.pop("config", None)
    try:
        if not isinstance(config, ALiBiCausalLMConfig):
            config = ALiBiCausalLMConfig.from_pretrained(folder)
        choose(config, chosen)
        if not kwargs.keys() & _OTHER_WEIGHTS:
            folder_check.check_sizes(Path(folder), config)
        model, info = load(folder, *args, config=config, output_loading_info=True, **kwargs)
    except (SafetensorError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder} is damaged: {checkpoint.cause(error)}; save or download it again") from error
    folder_check.check_names(Path(folder), info)
    return (model, info) if wants_info else model


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f'dtype is {dtype!r} but must be a floating dtype of torch, or "auto"')
    return dtype
