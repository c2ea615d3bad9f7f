"""Passes the queries and keys of every attention layer to a callback during a forward pass; nothing is stored.

Works on patched models and on `ALiBiForCausalLM`: both call `patched_attention.attended`, whose attention function can be
replaced per layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from alibi_attn.attention.api import alibi_attention
from alibi_attn.nn.replacement import replaced, restore

See = Callable[[int, Tensor, Tensor, Tensor, float], None]


@contextlib.contextmanager
def watched(model: nn.Module, see: See) -> Iterator[int]:
    """Within the block, every attention layer calls `see(layer, query, key, slopes, scale)` before it attends.

    Args:
        see: receives the layer's index in the model, query [B, H, T, D], key [B, K, S, D], slopes [H] and the factor of q·k.

    Yields:
        The number of layers.

    Raises:
        ValueError: no layer uses alibi_attention, another tool has already replaced the model's attention, or the model
            reproduces a checkpoint's rounding.
    """
    layers = [module for module in model.modules() if hasattr(module, "alibi_settings")]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that uses alibi_attention; pass a model patched by alibi_attn.hf.patch, or an "
            "ALiBiForCausalLM"
        )
    if any("attend" in vars(layer) for layer in layers):
        raise ValueError("the model's attention has been replaced (by context_parallel); call undo() on that first")
    if any(vars(layer)["alibi_settings"].numerics != "exact" for layer in layers):
        raise ValueError(
            'a model with numerics="checkpoint" does not compute its attention with alibi_attention; use numerics="exact"'
        )
    names = {module: name for name, module in model.named_modules()}
    changes = [
        replaced(layer, names[layer], "attend", functools.partial(_call_and_attend, see, number))
        for number, layer in enumerate(layers)
    ]
    try:
        yield len(layers)
    finally:
        restore(changes, "watched(model)")


def _call_and_attend(
    see: See, number: int, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **given: Any
) -> Tensor:
    see(number, query, key, slopes, given["scale"])
    mixed: Tensor = alibi_attention(query, key, value, slopes, **given)
    return mixed
