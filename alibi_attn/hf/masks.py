"""The mask that a patched model builds instead of an n×n mask: [B, S] bool, True = visible, without causality.

It reaches the layers as [B, 1, 1, S], because transformers passes masks of four dimensions on unmodified. A mask without columns,
[B, 1, 1, 0], means that every key is visible. Read next: `patching.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function, create_causal_mask

from alibi_attn.attention.transforms import may_read

# The names of the two masks below in transformers' table of mask functions.
INDEXED = "alibi_attn"
COUNTED = "alibi_attn_counted"


def of_layers(
    name: str, config: PreTrainedConfig, tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None
) -> Tensor:
    """The mask that every layer of a patched model receives, [B, 1, 1, S | 0] bool.

    Args:
        name: INDEXED or COUNTED.
        config: the model's.
        tokens: [B, T] or their embeddings [B, T, E].
        attention_mask: the caller's, [B, S] over the cached tokens and the new ones, or None.

    Raises:
        ValueError: a wrong shape, a mask that does not cover the cached tokens, holes under COUNTED, or a model that is not
            causal.
    """
    if not getattr(config, "is_causal", True):
        raise ValueError(_CAUSAL)
    if attention_mask is not None:
        _check(attention_mask, tokens.shape[0])
    sizes = torch.empty(*tokens.shape[:2], 0, device=tokens.device)  # transformers reads the shape only
    mask = create_causal_mask(_CONFIGS[name], sizes, attention_mask, past_key_values=cache)
    assert isinstance(mask, Tensor)  # built by one of the two functions below
    return mask[:, None, None, :]


def _check(mask: Tensor, batch: int) -> None:
    if mask.ndim != 2:
        raise ValueError(
            f"the attention mask has shape {list(mask.shape)} but must be [B, S] in a patched model, 1 = visible; pass such a "
            "mask, or call undo() on the patch"
        )
    if mask.shape[0] != batch:
        raise ValueError(f"attention_mask has {mask.shape[0]} rows but the batch has {batch}")
    # A floating dtype may be an additive mask (0 and −inf); integers are not checked.
    if mask.is_floating_point() and may_read(mask) and bool((mask != mask.bool()).any()):
        raise ValueError("attention_mask has values other than 0 and 1; pass 1 for a token and 0 for padding")


def padded(*, attention_mask: Tensor | None, past_key_values: Cache, **_: object) -> Tensor | None:
    """Replaces a model's `create_masks_for_generate`, which builds n×n for a static cache: [B, S] over its whole capacity."""
    if attention_mask is None:
        return None
    room = past_key_values.get_max_length() - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, max(room, 0)))


def indexed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    *,
    mask_function: Callable[..., object] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **_: object,
) -> Tensor:
    """The mask for distances by index, where holes need no special treatment (MPT, or the checkpoint's bias)."""
    if mask_function is not causal_mask_function:
        raise ValueError(_CAUSAL)
    if attention_mask is None or attention_mask.shape[1] == 0:
        return torch.ones(batch_size, 0, dtype=torch.bool, device=device)
    length = attention_mask.shape[1]
    if torch.compiler.is_compiling() or (isinstance(q_offset, Tensor) and q_offset.device.type != "cpu"):
        needed = q_length  # q_offset may be on a GPU and is not read, which would synchronize
    else:
        needed = int(q_offset) + q_length
    if length < needed:
        raise ValueError(
            f"attention_mask covers {length} positions but must cover {needed}: "
            f"the cached tokens and the {q_length} new ones"
        )
    seen = attention_mask.to(torch.bool)
    if seen.device.type == "cpu" and not torch.compiler.is_compiling() and bool(seen.all()):
        return seen[:, :0]
    return torch.nn.functional.pad(seen, (0, max(kv_length - length, 0)))


def counted_mask(*sizes: Any, **options: Any) -> Tensor:
    """Like `indexed_mask`, for families that count positions over the visible tokens.

    Such positions equal the indices up to a shift, unless the mask has holes, which raise an error.
    """
    seen = indexed_mask(*sizes, **options)
    if seen.shape[1]:
        starts = (seen[:, 1:] & ~seen[:, :-1]).sum(1) + seen[:, 0]
        message = (
            "attention_mask has a row with a hole (0 between 1s). This model counts positions over the 1s, so exact attention by "
            "index would give different results: pad on one side only (left, to generate), or patch "
            'with numerics="checkpoint"'
        )
        if seen.device.type == "cpu" and not torch.compiler.is_compiling():
            if bool((starts > 1).any()):
                raise ValueError(message)
        else:  # avoids a synchronization or graph break, and still never returns a wrong logit
            torch._assert_async((starts <= 1).all(), message)
    return seen


AttentionMaskInterface.register(INDEXED, indexed_mask)
AttentionMaskInterface.register(COUNTED, counted_mask)

_CAUSAL = "a patched model is causal with one sequence per row; call undo() on the patch for other masks"
_CONFIGS = {name: PreTrainedConfig(attn_implementation=name) for name in (INDEXED, COUNTED)}  # type: ignore[call-arg]
