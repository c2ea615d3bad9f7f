"""Loads a decoder that transformers builds, and checks its folder.

transformers itself draws missing weights at random, ignores others, and builds whatever the config describes.

`check_sizes` runs before the model is built, `check_names` afterwards. Checkpoints that we read ourselves have the same checks in
`checkpoint.py`.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from alibi_attn.hf.readers import checkpoint, checkpoint_files
from alibi_attn.hf.readers.families.family import SIZES

# Every exception that transformers was seen to raise on wrong content of a config or file, and their base classes.
_ERRORS = (*checkpoint_files.READ_ERRORS, ImportError, StrictDataclassError)


def load(folder: Path) -> PreTrainedModel:
    """The model in evaluation mode, with its head. Code in the folder is never run.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: a damaged or missing file, or weights that do not fit the config.
    """
    with _one_sentence(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = check_sizes(folder, config)
    with _one_sentence(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False
        )
    model: PreTrainedModel = loaded[0]
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in names)
    check_names(folder, loaded[1], prefix=prefix if has_prefix else "")
    return model.eval()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _one_sentence(folder: Path) -> Iterator[None]:
    """Turns an exception of transformers into a ValueError that names the folder.

    Raises:
        ValueError: the block raised.
    """
    try:
        yield
    except _ERRORS as error:
        reason = (checkpoint.cause(error) or type(error).__name__).rstrip(" .")
        advice = (
            "" if isinstance(error, ImportError) else "; if files are damaged or missing, save or download it again"
        )
        raise ValueError(f"{folder} cannot be loaded: {reason[:300]}{advice}") from error


def check_sizes(folder: Path, config: PreTrainedConfig) -> Collection[str]:
    """Compares a decoder's config with the weights, before memory is allocated for a model of its sizes. Returns their names.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: a damaged file, another number of layers, heads that do not divide the width, or weights of other sizes.
    """
    where = folder / checkpoint_files.CONFIG
    shapes = {name: tensor.shape for name, tensor in checkpoint_files.read_state(folder, data=False).items()}
    for name in SIZES:
        if type(value := getattr(config, name, None)) is not int or value < 1:
            raise ValueError(f"{where} has {name} = {value!r} but it must be an integer of at least 1; correct it")
    counted = len({match[1] for name in shapes if (match := re.search(r"(?:^|\.)(\d+)\.", name))})
    checkpoint.check_layers(folder, config, counted)
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"{where} has {config.num_attention_heads} heads, which must divide the width, {config.hidden_size}; correct it"
        )
    with _one_sentence(folder), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    prefix = f"{model.base_model_prefix}."  # missing from names that were saved without the head
    wrong = {}
    for name, wanted in model.state_dict().items():  # the weights that the model and the folder both have
        stored = shapes.get(name, shapes.get(name.removeprefix(prefix), wanted.shape))
        if stored != wanted.shape:
            wrong[name] = f"{name} {list(stored)} instead of {list(wanted.shape)}"
    if wrong:
        which = checkpoint.listed(wrong.values(), 3)
        raise ValueError(f"{folder} has {_count(wrong, 'mismatched')}: {which}; {checkpoint.ONE_SOURCE}")
    return shapes.keys()


def check_names(folder: Path, info: Mapping[str, Collection[str]], *, prefix: str = "") -> None:
    """Raises ValueError if weights are missing or unexpected. Logs those of another head.

    Args:
        info: the second result of `from_pretrained(..., output_loading_info=True)`.
        prefix: of all stored names of the model without its head, if they have one.
    """
    unexpected = {name for name in info["unexpected_keys"] if name.startswith(prefix)}
    checkpoint.log_heads(folder, set(info["unexpected_keys"]) - unexpected)
    for kind, wrong in (("missing", info["missing_keys"]), ("unexpected", unexpected)):
        if wrong:
            raise ValueError(
                f"{folder} has {_count(wrong, kind)}: {checkpoint.listed(wrong, 3)}; {checkpoint.ONE_SOURCE}"
            )


def _count(names: Collection[Any], kind: str) -> str:
    return f"{len(names)} {kind} weight{'s' * (len(names) > 1)}"
