"""Records the queries and keys of every attention layer during a forward pass; nothing is kept.

Works on patched models and on `ALiBiForCausalLM`: both call `patched_attention.attended`, whose attention function can be
replaced per layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from alibi_attn.attention.api import alibi_attention

See = Callable[[int, Tensor, Tensor, Tensor, float], None]


@contextlib.contextmanager
def watched(model: nn.Module, see: See) -> Iterator[int]:
    """Within the block every attention layer calls `see(layer, query, key, slopes, scale)` and then attends as before.

    Args:
        see: is handed the layer's number in the model's order, query [B, H, T, D], key [B, K, S, D], slopes [H] and the factor
            of q·k.

    Yields:
        How many layers there are.

    Raises:
        ValueError: a model without layers that attend with ours, or one whose attention is replaced already.
    """
    layers = [module for module in model.modules() if hasattr(module, "alibi_settings")]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention of ours; pass a model that alibi_attn.hf.patch has patched, or an "
            "ALiBiForCausalLM"
        )
    if any("attend" in vars(layer) for layer in layers):
        raise ValueError("the model's attention is replaced already (context_parallel); undo() that first")
    try:
        for number, layer in enumerate(layers):
            vars(layer)["attend"] = functools.partial(_seen, see, number)
        yield len(layers)
    finally:
        for layer in layers:
            vars(layer).pop("attend", None)


def _seen(see: See, number: int, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **given: Any) -> Tensor:
    see(number, query, key, slopes, given["scale"])
    mixed: Tensor = alibi_attention(query, key, value, slopes, **given)
    return mixed
