"""Converts state dicts of `alibi_attn.nn` to Flax parameters, and back."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from alibi_attn.jax.call.plan import Array

Weights: TypeAlias = "Mapping[str, Array | NDArray[np.generic] | Weights]"

_FLAX_NAMES = {"ffn.0": "ffn_in", "ffn.3": "ffn_out", "slopes.values": "slopes"}
_TORCH_NAMES = {flax: torch for torch, flax in _FLAX_NAMES.items()}
_LINEAR = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "ffn_in", "ffn_out")
_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")


def converted_weights(weights: Weights) -> dict[str, object]:
    """Weights of `alibi_attn.nn` as Flax's parameters, and Flax's parameters as a state dict of `alibi_attn.nn`.

    A flat dictionary ("attention.q_proj.weight": [out, in]) is a PyTorch state dict of a block, an attention layer, or a module
    that contains them. A nested one ({"attention": {"q_proj": {"kernel": [in, out]}}}) holds Flax's parameters. Values are
    arrays; they are transposed and not copied.

    Raises:
        ValueError: a name that has no counterpart.

    >>> converted_weights({"q_proj.weight": np.zeros((6, 4))})["q_proj"]["kernel"].shape
    (4, 6)
    >>> list(converted_weights({"q_proj": {"kernel": np.zeros((4, 6))}}))
    ['q_proj.weight']
    """
    if any(isinstance(value, Mapping) for value in weights.values()):
        return dict(_torch_entries(weights, ""))
    nested: dict[str, object] = {}
    for name, value in weights.items():
        *path, leaf = _flax_path(name)
        place = nested
        for part in path:
            place = place.setdefault(part, {})  # type: ignore[assignment]
        place[leaf] = value.T if leaf == "kernel" else value  # type: ignore[union-attr]
    return nested


def _flax_path(name: str) -> list[str]:
    for torch, flax in _FLAX_NAMES.items():
        name = name.removesuffix(torch) + flax if name.endswith(torch) else name.replace(f"{torch}.", f"{flax}.")
    *path, leaf = name.split(".")
    module = path[-1] if path else ""
    if leaf == "weight" and module in _LINEAR:
        return [*path, "kernel"]
    if leaf == "weight" and module in _NORMS:
        return [*path, "scale"]
    if leaf == "slopes" or (leaf == "bias" and module in (*_LINEAR, *_NORMS)):
        return [*path, leaf]
    raise ValueError(
        f"{name} has no counterpart in Flax: converted are the slopes, and weight and bias of {', '.join((*_LINEAR, *_NORMS))}"
    )


def _torch_entries(weights: Weights, prefix: str) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for name, value in weights.items():
        if isinstance(value, Mapping):
            entries += _torch_entries(value, f"{prefix}{_TORCH_NAMES.get(name, name)}.")
        elif name in ("kernel", "scale"):
            entries.append((f"{prefix}weight", value.T if name == "kernel" else value))
        elif name in ("bias", "slopes"):
            entries.append((f"{prefix}{_TORCH_NAMES.get(name, name)}", value))
        else:
            raise ValueError(
                f"{prefix}{name} has no counterpart in PyTorch: converted are kernel, scale, bias and slopes"
            )
    return entries
