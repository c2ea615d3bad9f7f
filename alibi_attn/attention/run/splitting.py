"""Which fields of a call split off, so that a backend that does not read them computes its parts (`merging.py`).

No framework is imported: JAX splits by the same rules.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from alibi_attn.attention.call.reads import FLASH_ATTN, MASKS, NUMBERED_DROPOUT, PARTS, SPACE
from alibi_attn.attention.call.spec import AttentionSpec

# The fields that can be split off, and those that the parts have instead. All parts return lse.
SPLITS: Mapping[str, frozenset[str]] = {
    "sink_logits": frozenset(),
    "registers": frozenset(),
    "head_windows": frozenset({"window"}),
    "right_window": frozenset({"window"}),
    "sinks": frozenset({"window"}),
    "prefix_len": frozenset({"key_mask"}),
    "positions": frozenset({"key_bias", "query_bias"}),
    "query_positions": frozenset({"key_bias", "query_bias"}),
    "by_position": frozenset({"key_mask"}),
}
# A call with other fields has no parts, except that of its sink logits.
READS = MASKS | PARTS | SPACE | FLASH_ATTN | NUMBERED_DROPOUT | {"key_bias", "sink_logits"}


class Split(NamedTuple):
    """How a consumer computes a call: the fields that are split off, and those that it cannot compute (then it must not)."""

    off: frozenset[str]
    unread: frozenset[str]


WHOLE = Split(frozenset(), frozenset())


def split(
    used: frozenset[str],
    reads: frozenset[str],
    splits: frozenset[str] = frozenset(SPLITS),
    merges: frozenset[str] = READS,
) -> Split:
    """How a call that uses these fields runs where these are read.

    Args:
        splits: the fields that can be split off.
        merges: those of calls that have parts.
    """
    if used <= reads:
        return WHOLE
    off = (used - reads) & splits
    unread = (used - reads - off) | {name for name in off if not SPLITS[name] <= reads}
    if off - {"sink_logits"}:
        unread |= used - merges
    return Split(off, unread)


def first_split(spec: AttentionSpec[Any]) -> Literal["registers", "heads", "sinks", "one axis", "sides", "positions"]:
    """By what a call that has parts splits first; its parts may have parts again."""
    if spec.registers > 0:
        return "registers"
    if spec.head_windows is not None:
        return "heads"
    if spec.sinks > 0:
        return "sinks"
    if spec.by_position:
        return "one axis"
    return "positions" if spec.causal and spec.prefix_len is None else "sides"


def register_queries(spec: AttentionSpec[Any]) -> int:
    """How many queries are registers; they are the first ones. In an exported call `min` of a symbolic length stays symbolic."""
    count = max(spec.registers - int(spec.query_offset), 0)
    return count if count < spec.query_len else spec.query_len
