"""The mask that a patched model builds instead of an n×n mask: [B, R, 1, S] bool, without causality.

Row 0 says which keys are visible. A mask without columns, [B, 1, 1, 0], means that all are. R is 1, plus 1 if row 1 says where a
text begins after another one in the same row, plus 2 if distances count visible keys, because the mask has holes, plus 4 if the
next row says which keys are in the prefix; plus 64 rows with the bits of positions. It is bool and has four dimensions because
transformers passes such masks on unmodified. Read next: `patching.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from alibi_attn.attention.call.checks import check_positions, check_prefix_len
from alibi_attn.attention.call.part_options import check_prefix_values, check_sorted
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.hf.attention import packed_rows
from alibi_attn.hf.attention.packed_rows import PackedMask

# How a family counts the distances of a mask with holes: by index, or over the visible tokens.
INDEXED, COUNTED = "indexed", "counted"

_BITS = 64  # of a position


class Keys(NamedTuple):
    """What a layer reads from the mask, [B, S] each; None = all visible, one text, distances by index.

    Args:
        seen: True = visible.
        segments: the number of the text.
        shift: the position counted over the visible keys, less the index.
        prefix_len: [B], of a prefix language model.
        positions: explicit ones, fp64.
    """

    seen: Tensor | None
    segments: Tensor | None = None
    shift: Tensor | None = None
    prefix_len: Tensor | None = None
    positions: Tensor | None = None


def keys_of(mask: Tensor, key_len: int | None = None) -> Keys:
    """Decodes a mask of `of_layers` for this number of keys; None = any."""
    if mask.ndim != 4 or mask.shape[2] != 1 or not 1 <= mask.shape[1] <= 8 + _BITS or mask.dtype != torch.bool:
        raise ValueError(
            f"a patched layer received a mask {list(mask.shape)} of {mask.dtype} instead of a bool mask [B, R, 1, S]; call "
            "the whole model that was patched, not a part of it"
        )
    if key_len is not None and mask.shape[3] > key_len:
        raise ValueError(
            f"a patched layer received a mask of {mask.shape[3]} keys but has {key_len}; its cache was dropped on the way to it"
        )
    if not mask.shape[3]:
        return Keys(None)
    seen, flags = mask[:, 0, 0], (mask.shape[1] - 1) % _BITS
    at = torch.arange(mask.shape[3], device=mask.device)
    return Keys(
        seen,
        segments=mask[:, 1, 0].cumsum(1) if flags & 1 else None,
        shift=seen.cumsum(1) - 1 - at if flags & 2 else None,
        prefix_len=mask[:, flags, 0].sum(1) if flags & 4 else None,
        positions=_of_bits(mask[:, -_BITS:, 0]) if mask.shape[1] > _BITS else None,
    )


def of_layers(
    name: str,
    config: PreTrainedConfig,
    tokens: Tensor,
    attention_mask: Tensor | PackedMask | None,
    cache: Cache | None,
    packing: Mapping[str, Any],
) -> Tensor:
    """The mask that every layer of a patched model receives, [B, R, 1, S | 0] bool.

    Args:
        name: INDEXED or COUNTED.
        config: the model's.
        tokens: [B, T] or their embeddings [B, T, E].
        attention_mask: the caller's, [B, S] over the cached tokens and the new ones, or None; or a causal block for each text,
            [B, 1, T, S].
        packing: arguments that tell texts in one row apart; see `packed_rows.py`.

    Raises:
        ValueError: a wrong shape, a mask that does not cover the cached tokens, arguments that contradict one another, or a model
            that is not causal.
    """
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "a patched model is causal with one sequence per row; call undo() on the patch for other masks"
        )
    if isinstance(attention_mask, PackedMask):
        packing = {**packing, **attention_mask.packing}
        attention_mask = attention_mask.attention_mask
    past: int | Tensor = 0 if cache is None else cache.get_seq_length()
    if attention_mask is not None and attention_mask.ndim == 4:
        _check_rows(attention_mask, tokens.shape[0])
        attention_mask, blocks = packed_rows.from_blocks(attention_mask, past=past)
        packing = {**packing, "blocks": blocks}
    if attention_mask is not None:
        check(attention_mask, tokens.shape[0])
    # S, with the whole capacity of a static cache.
    capacity = tokens.shape[1] if cache is None else int(cache.get_mask_sizes(tokens.shape[1], 0)[0])
    seen = visible(attention_mask, tokens, past, capacity)
    begins = prefix = positions = None
    if packing:
        whole = seen if seen.shape[1] else seen.new_ones(len(seen), capacity)
        begins = packed_rows.starts(packing, whole, query_len=tokens.shape[1], past=past)
        prefix = _prefix(packing.get("prefix_len"), whole, query_len=tokens.shape[1], past=past)
        positions = _bits(packing.get("positions"), whole, past=past)
        seen = whole if any(x is not None for x in (begins, prefix, positions)) else seen
    counted = name == COUNTED and seen.shape[1] > 0 and positions is None and _may_have_holes(seen)
    flags = (begins is not None) + 2 * counted + 4 * (prefix is not None)
    rows = [seen] * (1 + flags)
    if begins is not None:
        rows[1] = begins
    if prefix is not None:
        rows[-1] = prefix
    mask = torch.stack(rows, 1) if flags else seen[:, None]
    return (mask if positions is None else torch.cat([mask, positions], 1))[:, :, None]


def _prefix(prefix_len: Tensor | None, seen: Tensor, *, query_len: int, past: int | Tensor) -> Tensor | None:
    """[B, S] bool: the keys in the prefix; None for a single token, which has no key to its right."""
    if prefix_len is None:
        return None
    if not isinstance(prefix_len, Tensor):
        raise TypeError(f"prefix_len is {type(prefix_len).__name__} but must be a tensor [B] of integers")
    check_prefix_len(prefix_len, batch=len(seen), causal=True)
    if query_len == 1:
        return None
    if not isinstance(past, Tensor):
        most, of = (past, "the cached tokens, which must hold the prefix") if past else (query_len, "T")
        check_prefix_values(prefix_len, most, of)
    return torch.arange(seen.shape[1], device=seen.device) < prefix_len[:, None]


def _bits(positions: Tensor | None, seen: Tensor, *, past: int | Tensor) -> Tensor | None:
    """[B, 64, S] bool from positions [B, S] over the cached tokens and the new ones."""
    if positions is None:
        return None
    if isinstance(past, Tensor):
        raise ValueError(
            "positions need a cache that grows, such as ALiBiCache; a static cache has no position for its room"
        )
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is {type(positions).__name__} but must be a tensor [B, S] of float32 or float64")
    check_positions("positions", positions, batch=len(seen), length=seen.shape[1], axis="S")
    check_sorted("positions", positions)
    at = torch.arange(_BITS, device=positions.device)[:, None]
    return (positions.double().view(torch.int64)[:, None] >> at & 1).bool()


def _of_bits(bits: Tensor) -> Tensor:
    """The inverse of `_bits`."""
    at = torch.arange(_BITS, device=bits.device)[:, None]
    return (bits.long() << at).sum(1).view(torch.float64)


def _may_have_holes(seen: Tensor) -> bool:
    """Whether some row has a hidden key between visible ones; True on a GPU and in compiled code, where reading would wait."""
    if not may_read(seen):
        return True
    return bool(((seen[:, 1:] & ~seen[:, :-1]).sum(1) + seen[:, 0] > 1).any())


def check(mask: Tensor, batch: int) -> None:
    """Raises ValueError unless the mask is [B, S] and holds zeros and ones."""
    if mask.ndim != 2:
        raise ValueError(
            f"the attention mask has shape {list(mask.shape)} but must be [B, S] in a patched model, 1 = visible, or "
            "[B, 1, T, S] with a causal block for each text; pass such a mask, or call undo() on the patch"
        )
    _check_rows(mask, batch)
    # A floating dtype may be an additive mask (0 and −inf); integers are not checked.
    if mask.is_floating_point() and may_read(mask) and bool((mask != mask.bool()).any()):
        raise ValueError("attention_mask has values other than 0 and 1; pass 1 for a token and 0 for padding")


def _check_rows(mask: Tensor, batch: int) -> None:
    if mask.shape[0] != batch:
        raise ValueError(f"attention_mask has {mask.shape[0]} rows but the batch has {batch}")


def padded(*, attention_mask: Tensor | None, past_key_values: Cache, **_: object) -> Tensor | None:
    """Replaces a model's `create_masks_for_generate`, which builds n×n for a static cache: [B, S] over its whole capacity."""
    if attention_mask is None:
        return None
    room = past_key_values.get_max_length() - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, max(room, 0)))


def visible(attention_mask: Tensor | None, tokens: Tensor, past: int | Tensor = 0, capacity: int = 0) -> Tensor:
    """[B, S | 0] bool, True = visible, from a mask over the cached tokens and these, padded to the capacity of a cache."""
    if attention_mask is None or attention_mask.shape[1] == 0:
        return torch.ones(len(tokens), 0, dtype=torch.bool, device=tokens.device)
    length, query_len = attention_mask.shape[1], tokens.shape[1]
    if torch.compiler.is_compiling() or (isinstance(past, Tensor) and past.device.type != "cpu"):
        needed = query_len  # the cached length may be on a GPU and is not read, which would synchronize
    else:
        needed = int(past) + query_len
    if length < needed:
        raise ValueError(
            f"attention_mask covers {length} positions but must cover {needed}: "
            f"the cached tokens and the {query_len} new ones"
        )
    seen = attention_mask.to(tokens.device, torch.bool)
    if may_read(seen) and bool(seen.all()):
        return seen[:, :0]
    return torch.nn.functional.pad(seen, (0, max(capacity - length, 0)))
