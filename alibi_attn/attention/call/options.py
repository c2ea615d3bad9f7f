"""The options of functions that describe a call: their types, once for PyTorch and JAX, and their defaults.

No framework is imported. `alibi_attention` explains them. An option that reaches the description unchanged has the name of its
field in `spec.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = TypeVar("Array")

Slopes: TypeAlias = Sequence[float] | NDArray[np.floating] | Array
Window: TypeAlias = int | Sequence[int] | NDArray[np.integer] | Array
SegmentIds: TypeAlias = Array | tuple[Array, Array]


class ScoreOptions(TypedDict, total=False):
    """The keywords shared by all functions, except window, return_lse and backend."""

    scale: float | None
    dropout_p: float


class SharedOptions(ScoreOptions, total=False):
    """The keywords shared by the functions whose heads have one window."""

    window: int | None


class HiddenKeys(TypedDict, Generic[Array], total=False):
    """The keywords that hide keys of a sequence."""

    key_mask: Array | None
    segment_ids: SegmentIds[Array] | None


class MaskOptions(SharedOptions, HiddenKeys[Array], total=False):
    """The keywords shared by the functions of a batch whose heads have one window."""


class BiasOptions(TypedDict, Generic[Array], total=False):
    """The keywords of functions whose keys may have biases."""

    key_bias: Array | None
    sink_logits: Array | None
    tolerance: float | None


class DirectionOptions(TypedDict, Generic[Array], total=False):
    """The keywords for keys to the right."""

    causal: bool
    right_slopes: Slopes[Array] | None


class VarlenOptions(SharedOptions, BiasOptions[Array], DirectionOptions[Array], total=False):
    """The keywords of `alibi_attention_varlen`."""

    positions: Array | None
    cu_seqlens_k: Array | None


class AttentionOptions(ScoreOptions, HiddenKeys[Array], BiasOptions[Array], DirectionOptions[Array], total=False):
    """The keywords of `alibi_attention`, which explains them."""

    query_offset: int | Array | None
    window: Window[Array] | None
    sinks: int
    prefix_len: Array | None
    positions: Array | None
    query_positions: Array | None
    registers: int


class SpecOptions(AttentionOptions[Array], total=False):
    """The keywords of `make_spec`, and of functions that describe a call without computing it."""

    return_lse: bool


class LayerOptions(TypedDict, total=False):
    """The keywords shared by PyTorch's and Flax's attention layers, without dropout."""

    num_kv_heads: int | None
    bias: bool
    causal: bool
    sinks: int
    registers: int
    learn_slopes: bool
    qk_norm: bool
    forget_gate: bool


class GatedOptions(MaskOptions[Array], BiasOptions[Array], total=False):
    """The keywords of calls with forget gates."""


class ForgettingOptions(GatedOptions[Array], total=False):
    """The keywords of `forgetting_attention`."""

    query_offset: int | None


class ToeplitzOptions(MaskOptions[Array], total=False):
    """The keywords of `toeplitz_attention`."""

    causal: bool
    tolerance: float | None
    query_offset: int | None


# Those of SpecOptions, in the order in which signatures show them.
DEFAULTS: Mapping[str, Any] = {
    "causal": True,
    "right_slopes": None,
    "window": None,
    "sinks": 0,
    "scale": None,
    "query_offset": None,
    "prefix_len": None,
    "positions": None,
    "query_positions": None,
    "registers": 0,
    "key_mask": None,
    "segment_ids": None,
    "key_bias": None,
    "sink_logits": None,
    "dropout_p": 0.0,
    "tolerance": None,
    "return_lse": False,
}
# The options that are validated and then change; the others reach the description as they were given: a new one is among them
# until it is changed.
_CHANGED = frozenset(
    {"right_slopes", "window", "scale", "query_offset", "segment_ids", "key_bias", "sink_logits", "tolerance"}
    | {"sinks", "prefix_len", "positions", "query_positions"}
)
UNCHANGED = tuple(name for name in DEFAULTS if name not in _CHANGED)


def named_arrays(options: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    """(name, what was given) of the options that must be arrays; `kind` is what the framework calls one."""
    names = ("key_mask", "key_bias", "sink_logits", "prefix_len", "positions", "query_positions")
    given = [(name, options[name]) for name in names if options[name] is not None]
    segment_ids = options["segment_ids"]
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids has {len(segment_ids)} parts but must be one {kind} [B, S] or a pair ([B, T], [B, S])"
            )
        given += [("segment_ids[0]", segment_ids[0]), ("segment_ids[1]", segment_ids[1])]
    elif segment_ids is not None:
        given.append(("segment_ids", segment_ids))
    return given
