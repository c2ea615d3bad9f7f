"""Avoids work on padding: packs a padded batch into one row of tokens with segments for all layers, and unpacks it at the end.

ALiBi depends only on distances, so a text may be moved within a row if its tokens are contiguous, as with padding on
the left or right. Batches with holes in the mask are not packed, because their distances are those of the indices in
the padded row. Compiled code and CUDA graphs do not pack either, because their shapes must not depend on the mask's values. In
these cases attention gets the mask.

A packed row is filled up to one of a few lengths, so that memory stays flat over many batches: libraries keep compiled code for
every number of rows that they have seen, and these small blocks fragment the memory that a batch frees.
"""

import dataclasses

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from alibi_attn.attention.call.checks import check_segments
from alibi_attn.attention.call.transforms import is_traced

_MOST_STEP = 64  # the length of a packed row of 2,048 tokens or more is a multiple of this

# Devices with a kernel that skips the keys of other segments. Elsewhere all scores of the long row would be computed.
_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of a batch inside the layers, and the masks for attention.

    Args:
        batch, length: B and T of the padded batch.
        mask: [B, T] bool, True = token; None if there is no padding.
        places: [N] indices of the tokens in the flattened batch [B·T] if packed; else None.
        segments: the text of each token, [1, N + filler] if packed, where the filler counts as one more text; else [B, T], or
            None with one text per row.
        filler: entries after the tokens of a packed row.
        positions: [B, T], as for `alibi_attention`; such a batch is not packed.
    """

    batch: int
    length: int
    mask: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None
    filler: int = 0
    positions: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, …] -> [1, N + filler, …] if packed; the filler is 0."""
        if self.places is None:
            return x
        rows = x.flatten(0, 1).index_select(0, self.places)
        return torch.cat((rows, rows.new_zeros(self.filler, *rows.shape[1:])))[None]

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack`: [B, T, E], 0 at padding."""
        if self.places is not None:
            tokens = x[0, : len(self.places)]
            rows = x.new_zeros(self.batch * self.length, x.shape[-1]).index_copy(0, self.places, tokens)
            return rows.unflatten(0, (self.batch, self.length))
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def first(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, E]: the first token of each text, after any left padding."""
        if self.mask is None:
            return x[:, 0]
        at = self.mask.to(torch.int8).argmax(dim=1)
        # Not take_along_dim: torch.export makes constants of its lengths.
        return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def packing(
    attention_mask: Tensor | None, batch: int, length: int, *, may_pack: bool, segment_ids: Tensor | None = None
) -> Packing:
    """The cheapest layout for a batch.

    Args:
        attention_mask: [B, T] of 0 and 1 (or bool), 1 = token; or None.
        may_pack: False if attention computes all scores of a row anyway.
        segment_ids: [B, T] integers, equal numbers are one text; None = one text per row.

    Raises:
        ValueError: a wrong shape, or values other than 0 and 1 (not checked while tracing or capturing).
    """
    if segment_ids is not None:
        check_segments("segment_ids", segment_ids, batch=batch, length=length, axis="T")
    if attention_mask is None:
        return Packing(batch, length, segments=segment_ids)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__} but must be a tensor [B, T]")
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)} but must be [B, T] = [{batch}, {length}], 1 = token, "
            "0 = padding"
        )
    mask = attention_mask.to(torch.bool)
    if is_traced() or is_functorch_wrapped_tensor(attention_mask) or _is_captured(mask):
        return Packing(batch, length, mask, segments=segment_ids)
    if not mask.numel():
        return Packing(batch, length, segments=segment_ids)
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    facts = torch.stack(((attention_mask != mask).any(), mask.sum(), starts.amax()))
    is_odd, tokens, most_starts = facts.tolist()  # together, because each read waits for a GPU
    if is_odd:
        raise ValueError("attention_mask has values other than 0 and 1; pass 1 for a token and 0 for padding")
    if tokens == mask.numel():
        return Packing(batch, length, segments=segment_ids)
    if not may_pack or mask.device.type not in _DEVICES or most_starts > 1 or not tokens:
        return Packing(batch, length, mask, segments=segment_ids)
    places = mask.flatten().nonzero()[:, 0]
    filler = -len(places) % _step(len(places))
    rows, texts = places // length, 1
    if segment_ids is not None:  # numbered anew, so that texts of different rows differ
        numbers, of_text = segment_ids.flatten()[places].unique(return_inverse=True)
        texts = len(numbers)
        rows = rows * texts + of_text
    segments = F.pad(rows, (0, filler), value=batch * texts)
    return Packing(batch, length, mask, places, segments[None], filler)


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _step(tokens: int) -> int:
    """The length of a packed row is a multiple of this power of two, so that the filler is less than 1/32 of the tokens.

    >>> [_step(tokens) for tokens in (63, 64, 512, 2048, 100_000)]
    [1, 2, 16, 64, 64]
    """
    return min(_MOST_STEP, 1 << max(0, tokens.bit_length() - 6))
