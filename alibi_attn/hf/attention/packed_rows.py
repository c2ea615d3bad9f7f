"""Rows that hold several texts: reads where a text begins from the arguments that transformers, flash-attn and others use.

    segment_ids, seq_idx [B, S]      equal numbers = one text
    cu_seq_lens_q, _k [N + 1]        where each text begins, then the length; one row only
    position_ids [B, T]              a position that is not larger than the one before it begins a text
    attention_mask [B, 1, T, S]      a causal block per text

Everything is read as one flag per position: True where a text begins after another. B, T, S as in `call/spec.py`; hidden
positions count for nothing. `prefix_len` and `positions` of `alibi_attention` travel with them. Read next: `masks.py`.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.call.transforms import is_traced, may_read

_IDS = ("segment_ids", "seq_idx")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
OF_ROWS = ("prefix_len", "positions")  # those that do not tell texts apart
NAMES = (*_IDS, *_LENGTHS, "position_ids", *OF_ROWS)
# Arguments of a forward pass that change nothing in these models: those of losses, which the heads use, and one that MusicGen's
# `generate` also passes to its text encoder.
WITHOUT_EFFECT = ("num_items_in_batch", "shift_labels", "ignore_index", "guidance_scale")


class PackedMask(NamedTuple):
    """What a head passes on as attention_mask to the model inside, whose own arguments are fewer."""

    attention_mask: Tensor | None
    packing: Mapping[str, Any]


def split(given: dict[str, Any], *, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """Removes the arguments NAMES, if they are not in `known`, and returns those that are not None.

    Raises:
        ValueError: another argument is neither known nor None or False, and so would have no effect.
    """
    packing = {name: given.pop(name) for name in NAMES if name in given and name not in known}
    for name in [name for name in given if name not in known]:
        value = given[name]
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        if name == "token_type_ids" and isinstance(value, Tensor) and may_read(value) and not bool(value.any()):
            continue
        hint = "; texts in one row are told apart by segment_ids" if name in ("sequence_id", "sequence_ids") else ""
        raise ValueError(f"{where} got {name}, which has no effect in this model{hint}; omit it")
    return {name: value for name, value in packing.items() if value is not None}


def starts(packing: Mapping[str, Any], seen: Tensor, *, query_len: int, past: int | Tensor) -> Tensor | None:
    """[B, S] bool: where a text begins after another one; None if every row is known to be one text.

    Args:
        packing: arguments by their names in NAMES, none of them None; "blocks" is the result of `from_blocks`.
        seen: [B, S] bool, True = visible; S is the whole capacity of a static cache.
        query_len, past: T, and the position of query 0.

    Raises:
        ValueError: wrong shapes or values, or arguments that contradict one another.
    """
    found = {}
    for name in _IDS:
        if name in packing:
            found[name] = _of_ids(name, packing[name], seen, query_len=query_len, past=past)
    lengths = {name: packing[name] for name in _LENGTHS if name in packing}
    if lengths:
        found["cu_seq_lens_q"] = _of_bounds(lengths, seen, query_len=query_len, past=past)
    if "blocks" in packing:
        found["attention_mask"] = packing["blocks"]
    for (first, left), (second, right) in itertools.pairwise(found.items()):
        _ensure(~((left != right) & seen).any(), f"{first} and {second} tell texts apart differently; pass one of them")
    result = next(iter(found.values()), None)
    if "position_ids" in packing:
        of_positions = _of_positions(packing["position_ids"], seen, query_len=query_len, past=past)
        if result is None or of_positions is None:
            result = of_positions if result is None else result
        else:
            inside = (of_positions & ~result).any()
            _ensure(~inside, f"position_ids restart within a text of {next(iter(found))}; pass one of them")
    may_wait = not is_traced() and (may_read(seen) or not found)  # transformers, too, waits for position_ids
    return None if result is None or (may_wait and not bool(result.any())) else result


def from_blocks(mask: Tensor, *, past: int | Tensor) -> tuple[Tensor, Tensor]:
    """(seen, starts), [B, S] bool each, of a mask [B, 1, T, S] that is a causal block for each text; reads it on the host.

    Args:
        mask: bool, True = visible, or floating point, 0 = visible and a very negative number = hidden.
        past: the number of cached keys.

    Raises:
        ValueError: it is another kind of mask.
    """
    advice = "pass an attention_mask [B, S] and segment_ids [B, S], or call undo() on the patch"
    if is_traced() or isinstance(past, Tensor):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, which compiled code and static caches cannot read; {advice}"
        )
    _, heads, query_len, key_len = mask.shape
    if heads != 1 or key_len != past + query_len:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} but must be [B, 1, T, S] with S = {past + query_len}, the cached keys and "
            f"the {query_len} new ones; {advice}"
        )
    if mask.is_floating_point():
        if not bool(((mask == 0) | (mask <= -1e4)).all()):
            raise ValueError(
                f"attention_mask {list(mask.shape)} adds numbers other than 0 and −inf to scores; {advice}"
            )
        mask = mask == 0
    allowed = mask[:, 0].bool()
    own = allowed[:, :, past:].diagonal(dim1=1, dim2=2)  # whether each new token sees itself
    first = allowed.int().argmax(-1)  # the first key that it sees
    cached = allowed[:, 0, :past] & own[:, :1]  # those that the first new token sees are of its text
    seen = torch.cat([cached, own], 1)
    text = torch.cat([first[:, :1].expand(-1, past), first], 1)
    filled = text.gather(1, _last_seen(seen, torch.arange(key_len, device=mask.device)).clamp(min=0))
    at = torch.arange(key_len, device=mask.device)
    expected = (at <= at[past:, None]) & seen[:, None] & (filled[:, past:, None] == filled[:, None])
    wrong = ((expected != allowed) & own[..., None]).any(-1)
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask {list(mask.shape)} is not a causal block for each text: see row {row}, token {token}; {advice}"
        )
    begins = torch.nn.functional.pad(filled[:, 1:] != filled[:, :-1], (1, 0))
    return seen, begins & seen


def _of_ids(name: str, ids: Tensor, seen: Tensor, *, query_len: int, past: int | Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} is {kind} but must hold integers [B, S], one number per text")
    length = seen.shape[1] if isinstance(past, Tensor) else past + query_len
    if tuple(ids.shape) != (seen.shape[0], length):
        raise ValueError(
            f"{name} has shape {list(ids.shape)} but must be [B, S] = [{seen.shape[0]}, {length}]: it covers the cached tokens "
            f"and the {query_len} new ones"
        )
    ids = torch.cat([ids.long(), ids[:, -1:].long().expand(-1, seen.shape[1] - length)], 1)
    at = torch.arange(seen.shape[1], device=seen.device)
    last = _last_seen(seen, at)
    filled = ids.gather(1, last.clamp(min=0))
    filled = torch.where(last < 0, filled.gather(1, (last >= 0).int().argmax(1, keepdim=True)), filled)
    begins = filled[:, 1:] != filled[:, :-1]
    ordered = filled.sort(dim=1).values
    texts = (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    _ensure(
        (begins.sum(1) == texts).all(),
        f"{name} returns to an earlier text after another, but each text must be contiguous; hide padding with attention_mask",
    )
    return torch.nn.functional.pad(begins, (1, 0))


def _of_bounds(lengths: Mapping[str, Any], seen: Tensor, *, query_len: int, past: int | Tensor) -> Tensor:
    bounds = lengths.get("cu_seq_lens_q", lengths.get("cu_seq_lens_k"))
    if not isinstance(bounds, Tensor) or bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{', '.join(lengths)}: cu_seq_lens_q must be an int32 or int64 tensor [N + 1] with the start of each of N texts and "
            "the number of tokens, as from DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        )
    if seen.shape[0] != 1 or isinstance(past, Tensor) or past:
        raise ValueError(
            f"cu_seq_lens_q needs one row without a cache, but there are {seen.shape[0]} rows and {past} cached tokens; pass "
            "segment_ids [B, S]"
        )
    if isinstance(other := lengths.get("cu_seq_lens_k"), Tensor) and other is not bounds:
        same = other.shape == bounds.shape
        _ensure(
            (other == bounds).all() if same else bounds.new_zeros(()).bool(), "cu_seq_lens_q and cu_seq_lens_k differ"
        )
    if not is_traced():
        numbers = bounds.tolist()
        longest = max((right - left for left, right in itertools.pairwise(numbers)), default=-1)
        if numbers[0] != 0 or numbers[-1] != query_len or numbers != sorted(numbers):
            raise ValueError(
                f"cu_seq_lens_q is {numbers[:8]}… but must begin with 0, never decrease and end with T = {query_len}"
            )
        for name in ("max_length_q", "max_length_k"):
            if (most := lengths.get(name)) is not None and int(most) < longest:
                raise ValueError(f"{name} is {int(most)} but a text has {longest} tokens")
    begins = torch.zeros(query_len + 1, dtype=torch.bool, device=seen.device)
    begins = begins.index_fill(0, bounds.to(seen.device).long(), True)
    return torch.nn.functional.pad(begins[1:-1], (1, 0))[None]


def _of_positions(positions: Tensor, seen: Tensor, *, query_len: int, past: int | Tensor) -> Tensor | None:
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        raise TypeError("position_ids must be an integer tensor [B, T]")
    if positions.ndim == 1:
        positions = positions[None]
    if positions.ndim != 2 or len(positions) not in (1, len(seen)) or positions.shape[1] != query_len:
        raise ValueError(
            f"position_ids has shape {list(positions.shape)} but must be [B, T] = [{seen.shape[0]}, {query_len}], those of the "
            "new tokens"
        )
    if query_len == 1 and not isinstance(past, Tensor) and may_read(positions, seen):
        counts = seen[:, :past].sum(1)
        own = positions.expand(len(seen), 1)[:, 0]
        if bool(((own == counts) | (own == past) | ~seen[:, past]).all()):
            return None  # the next token of the text
    begins, jumps = _restarts(positions.long().expand(len(seen), -1), seen, past)
    _ensure(
        ~jumps.any(),
        "position_ids jump ahead within a text, but distances are those of the tokens in the row (or of the visible tokens); "
        "pass consecutive positions, which may restart for each text, or omit them",
    )
    if may_read(seen, positions) or not (isinstance(past, Tensor) or past > 0):
        return begins
    _ensure(~begins.any(), "position_ids restart after cached tokens; on a GPU and in compiled code pass segment_ids")
    return None


def _restarts(positions: Tensor, seen: Tensor, past: int | Tensor) -> tuple[Tensor, Tensor]:
    """[B, S] bool each: where positions [B, T] of the last tokens begin a text, and where they skip some."""
    query_len = positions.shape[1]
    at = torch.arange(seen.shape[1], device=seen.device)
    new = (at >= past) & (at < past + query_len) & seen
    where = (torch.arange(query_len, device=seen.device) + past)[None].expand(len(seen), -1)
    own = torch.zeros_like(seen, dtype=torch.long).scatter(1, where, positions)
    before = torch.nn.functional.pad(_last_seen(seen, at)[:, :-1], (1, 0), value=-1)
    step = own - own.gather(1, before.clamp(min=0))
    inner = new & (before >= past)
    # A cached position is unknown: a first new token at position p continues the text of the p visible tokens before it.
    first = new & (before >= 0) & (before < past)
    count = seen.cumsum(1) - 1
    others = torch.where(first & (own != at), count - own, 0)  # the visible tokens before its text
    jumps = (inner & (step > 1) & (step != at - before)) | (others < 0) | (first & (own < 0))
    others = others.amax(1, keepdim=True)
    return (inner & (step <= 0)) | (seen & (count == others) & (others > 0)), jumps


def _last_seen(seen: Tensor, at: Tensor) -> Tensor:
    """[B, S]: the last visible position up to each one, −1 if there is none."""
    return torch.where(seen, at, -1).cummax(1).values


def _ensure(fits: Tensor, message: str) -> None:
    """Raises ValueError unless the flag is set; on a GPU and in compiled code, which must not wait, a device assertion."""
    if may_read(fits):
        if not bool(fits):
            raise ValueError(message)
    else:
        torch._assert_async(fits, message)
