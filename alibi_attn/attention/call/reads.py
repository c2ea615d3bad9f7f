"""What computes a call says which fields it reads, and one function compares: nothing ignores a part of a call.

Every consumer of an `AttentionSpec` (a backend, a function, the operators' schema) declares READS, the fields that it computes
in addition to those that every call has. A field that it does not read is refused, or split off (`run/splitting.py`). So a new
field is refused everywhere until a consumer names it. No framework is imported: JAX's consumers declare the same.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from alibi_attn.attention.call.spec import AttentionSpec

MASKS = frozenset(
    {"causal", "right_slopes", "window", "query_offset", "key_mask", "query_segments", "key_segments", "return_lse"}
)
PARTS = frozenset({"head_windows", "sinks", "prefix_len", "positions", "query_positions", "by_position", "registers"})
FLASH_ATTN = frozenset({"right_window"})  # what only flash-attn's functions have
SPACE = frozenset({"coordinates", "query_coordinates"})
GATES = frozenset({"key_bias", "query_bias", "query_start"})
DROPOUT = frozenset({"dropout_p", "dropout_seed"})
NUMBERED_DROPOUT = DROPOUT | {"query_numbers", "key_numbers"}  # also of parts, whose keys may be in another order

# Fields that users know by another name.
ARGUMENTS = {
    "causal": "causal=False",
    "head_windows": "window per head",
    "query_positions": "positions",
    "by_position": "positions",
    "coordinates": "positions in the plane or in space",
    "query_coordinates": "positions in the plane or in space",
    "right_window": "window_size",
    "query_offset": "query_offset as an array",
    "query_segments": "segment_ids",
    "key_segments": "segment_ids",
    "query_bias": "log_fgate",
    "query_start": "log_fgate",
    "dropout_seed": "dropout_p",
    "query_numbers": "dropout_p",
    "key_numbers": "dropout_p",
}


class Reads(NamedTuple):
    """A consumer: its name in errors, the fields that it computes, and what computes the others."""

    name: str
    fields: frozenset[str]
    instead: str = "alibi_attention"

    def check(self, spec: AttentionSpec[Any]) -> None:
        """Raises a ValueError if the call uses a field that the consumer does not read."""
        if unread := spec.used() - self.fields:
            raise ValueError(f"{self.name} does not support {arguments_of(unread)}; use {self.instead}, or omit it")


# The gates become biases of keys and of queries, and a first key for each query.
FORGETTING = Reads(
    "forgetting_attention",
    DROPOUT | {"window", "key_mask", "query_segments", "key_segments", "key_bias", "sink_logits", "return_lse"},
)


def arguments_of(fields: Iterable[str]) -> str:
    """The fields as users call them: "window per head, sinks"."""
    names = {**dict.fromkeys(name for name, _ in AttentionSpec.PLAIN), **dict.fromkeys(sorted(fields))}
    return ", ".join(dict.fromkeys(ARGUMENTS.get(name, name) for name in names if name in fields))
