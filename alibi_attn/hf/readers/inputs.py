"""Checks of configs and inputs, shared by the encoder and the decoder."""

from collections.abc import Iterable

import torch
from torch import Tensor


def checked_input(input_ids: Tensor | None, inputs_embeds: Tensor | None, *, width: int) -> Tensor:
    """Returns the input that was passed: ids [B, T], or embeddings [B, T, E].

    Raises:
        TypeError: not a tensor, ids that are not int32 or int64, or embeddings that are not floating.
        ValueError: both or neither, or another shape.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds")
    name, axes, given = ("input_ids", "[B, T]", input_ids)
    if inputs_embeds is not None:
        name, axes, given = ("inputs_embeds", "[B, T, E]", inputs_embeds)
    assert given is not None
    check_kind(name, given, is_index=inputs_embeds is None)
    if given.ndim != len(axes.split()) or given.shape[1] == 0:
        raise ValueError(f"{name} has shape {list(given.shape)} but must be {axes} with T ≥ 1 tokens")
    if inputs_embeds is not None and inputs_embeds.shape[2] != width:
        raise ValueError(f"inputs_embeds has width {inputs_embeds.shape[2]} but hidden_size is {width}")
    return given


def check(name: str, value: object, fits: bool, allowed: str) -> None:
    """Raises ValueError unless the value fits."""
    if not fits:
        raise ValueError(f"{name} is {value!r} but must be {allowed}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    check(name, value, value in choices, f"one of {', '.join(map(repr, choices))}")


def check_kind(name: str, value: Tensor, *, is_index: bool) -> None:
    """Raises TypeError unless the value is a tensor of int32 or int64 (`is_index`), or of a floating dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__} but must be a tensor; pass torch.tensor({name})")
    if is_index and value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {value.dtype} but must be int64 or int32; pass {name}.long()")
    if not is_index and not value.is_floating_point():
        raise TypeError(f"{name} is {value.dtype} but must have a floating dtype, that of the model")
