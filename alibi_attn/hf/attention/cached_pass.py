"""Forward passes of patched models: their arguments, and a cache that no layer may lose.

While activation checkpointing is on and the model is in training mode, transformers drops the cache of each layer, because the
backward pass would append to it again. A new token would then see only itself.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from alibi_attn.hf.attention import packed_rows

_FLAG = "gradient_checkpointing"  # of transformers' layers, and of its models


def arguments(
    model: PreTrainedModel, names: tuple[str, ...], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, Any], Tensor | None]:
    """The arguments of a patched model's forward: those of the original, those of `packed_rows.NAMES`, and the tokens.

    Args:
        names: those that the original takes, in its order.

    Raises:
        ValueError: an argument without effect, an output that a patched model cannot return, or an empty input.
    """
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    packing = packed_rows.split(given, known=names, where=type(model).__name__)
    wanted = given.get("output_attentions")
    if wanted or (wanted is None and model.config.output_attentions):
        raise ValueError(
            "output_attentions requests the T×S weights, which a patched model never builds; alibi_attn.hf.record_attention("
            "model, rows=[...]) records those of a few queries; for all of them call undo() on the patch"
        )
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return given, packing, None
    if tokens.ndim < 2 or tokens.shape[1] == 0:
        raise ValueError(f"the input has shape {list(tokens.shape)} but must be [B, T] with T ≥ 1 tokens")
    return given, packing, tokens


@contextlib.contextmanager
def whole(model: nn.Module, cache: Cache | None, *, use_cache: bool | None, new: int) -> Iterator[None]:
    """Within the block, layers do not checkpoint without gradients. Afterwards, the cache must hold the new tokens too.

    Args:
        model: whose layers run in the block.
        use_cache: the caller's argument; None for the model's default.
        new: the number of tokens in this pass.

    Raises:
        TypeError: `cache` is no cache of transformers.
        ValueError: a cache is needed while layers checkpoint gradients, a layer did not append to its cache, or the whole text
            is passed again although the cache holds it, as `generate` does with use_cache=False.
    """
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(
            f"past_key_values is a {type(cache).__name__} but must be a cache of transformers, such as ALiBiCache(); tuples of "
            "keys and values were accepted by earlier releases of transformers only"
        )
    before = 0 if cache is None else cache.get_seq_length()
    if use_cache is False and isinstance(before, int) and 0 < before < new:
        raise ValueError(
            f"the cache holds {before} tokens, but use_cache is False, so generate passes all {new} tokens again; "
            "pass use_cache=True"
        )
    modules = model.modules() if model.training else ()  # walking them costs more than a small model's decoding step
    checkpointing = [module for module in modules if getattr(module, _FLAG, False)]
    if checkpointing and torch.is_grad_enabled():
        if cache is not None or use_cache:
            raise ValueError(
                "gradient checkpointing drops the cache of every layer in training mode; generate in evaluation mode or under "
                "torch.no_grad(), or pass use_cache=False and no cache"
            )
        checkpointing = []
    for module in checkpointing:
        setattr(module, _FLAG, False)
    try:
        yield
    finally:
        for module in checkpointing:
            setattr(module, _FLAG, True)
    after = before if cache is None else cache.get_seq_length()
    if cache is not None and isinstance(before, int) and isinstance(after, int) and after != before + new:
        raise ValueError(
            f"the cache had {before} tokens and has {after} after {new} new ones, so a layer did not attend to it; remove what "
            "drops the cache between the model and its layers"
        )
