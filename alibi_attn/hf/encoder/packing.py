"""Avoids work on padding: packs a padded batch into one row of tokens with segments for all layers, and unpacks it at the end.

ALiBi depends only on distances, so a text may be moved within a row if its tokens are contiguous, as with padding on
the left or right. Batches with holes in the mask are not packed, because their distances are those of the indices in
the padded row. Compiled code does not pack either, because its shapes must not depend on the mask's values. In both
cases attention gets the mask.
"""

import dataclasses

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from alibi_attn.attention.transforms import is_traced

# Devices with a kernel that skips the keys of other segments. Elsewhere all scores of the long row would be computed.
_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of a batch inside the layers, and the masks for attention.

    Args:
        batch, length: B and T of the padded batch.
        mask: [B, T] bool, True = token; None if there is no padding.
        places: [N] indices of the tokens in the flattened batch [B·T] if packed; else None.
        segments: [1, N] the text to which each token belongs, if packed; else None.
    """

    batch: int
    length: int
    mask: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, …] -> [1, N, …] if packed."""
        return x if self.places is None else x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack`: [B, T, E], 0 at padding."""
        if self.places is not None:
            rows = x.new_zeros(self.batch * self.length, x.shape[-1]).index_copy(0, self.places, x[0])
            return rows.unflatten(0, (self.batch, self.length))
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def first(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, E]: the first token of each text, after any left padding."""
        if self.mask is None:
            return x[:, 0]
        at = self.mask.to(torch.int8).argmax(dim=1)
        # Not take_along_dim: torch.export makes constants of its lengths.
        return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def packing(attention_mask: Tensor | None, batch: int, length: int, *, may_pack: bool) -> Packing:
    """The cheapest layout for a batch.

    Args:
        attention_mask: [B, T] of 0 and 1 (or bool), 1 = token; or None.
        may_pack: False if attention computes all scores of a row anyway.

    Raises:
        ValueError: a wrong shape, or values other than 0 and 1 (checked if they can be read without synchronizing).
    """
    if attention_mask is None:
        return Packing(batch, length)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__} but must be a tensor [B, T]")
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)} but must be [B, T] = [{batch}, {length}], 1 = token, "
            "0 = padding"
        )
    mask = attention_mask.to(torch.bool)
    if is_traced() or is_functorch_wrapped_tensor(attention_mask):
        return Packing(batch, length, mask)
    if attention_mask.dtype != torch.bool and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask has values other than 0 and 1; pass 1 for a token and 0 for padding")
    if bool(mask.all()):
        return Packing(batch, length)
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if not may_pack or mask.device.type not in _DEVICES or bool((starts > 1).any()) or not bool(mask.any()):
        return Packing(batch, length, mask)
    places = mask.flatten().nonzero()[:, 0]
    return Packing(batch, length, mask, places, (places // length)[None])
