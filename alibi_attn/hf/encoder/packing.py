"""No work on padding: a padded batch as one row of tokens with segments, for all layers, and back at the end.

ALiBi sees distances only, so a text is the same wherever it stands in a row. That holds where its tokens stand together, as with
padding on the left or on the right. A mask with holes keeps its distances, those of the indices in the padded row, and
so does compiled code, where shapes must not depend on the mask's values: both take the mask as it is.
"""

import dataclasses

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from alibi_attn.attention.transforms import is_traced

# Where a kernel reads one segment's keys alone. Elsewhere all scores of the long row would be computed.
_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the tokens of a batch go through the layers, and what attention is told of them.

    Args:
        batch, length: B and T of the padded batch.
        mask: [B, T] bool, True = token; None where every position is one.
        places: [N] indices into B·T, where the batch is packed into one row; else None.
        segments: [1, N] the text that a token belongs to, where packed.
    """

    batch: int
    length: int
    mask: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, …] -> [1, N, …] where packed."""
        return x if self.places is None else x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """What `pack` gave, as [B, T, E]; 0 at padding."""
        if self.places is not None:
            rows = x.new_zeros(self.batch * self.length, x.shape[-1]).index_copy(0, self.places, x[0])
            return rows.unflatten(0, (self.batch, self.length))
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def first(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, E]: the first token of each text, behind the padding on its left."""
        if self.mask is None:
            return x[:, 0]
        at = self.mask.to(torch.int8).argmax(dim=1)
        return x.take_along_dim(at[:, None, None], dim=1)[:, 0]


def packing(attention_mask: Tensor | None, batch: int, length: int, *, may_pack: bool) -> Packing:
    """How a batch is best computed.

    Args:
        attention_mask: [B, T] of 0 and 1 (or bool), 1 = token; or None.
        may_pack: False where attention computes all scores of a row anyway.

    Raises:
        ValueError: another shape, or (where values can be read) other numbers.
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
        raise ValueError("attention_mask has other numbers than 0 and 1; pass 1 for a token and 0 for padding")
    if bool(mask.all()):
        return Packing(batch, length)
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    if not may_pack or mask.device.type not in _DEVICES or bool((starts > 1).any()) or not bool(mask.any()):
        return Packing(batch, length, mask)
    places = mask.flatten().nonzero()[:, 0]
    return Packing(batch, length, mask, places, (places // length)[None])
