"""Forward passes with a cache: no layer may lose it.

While activation checkpointing is on and the model is in training mode, transformers drops the cache of each layer, because the
backward pass would append to it again. A new token would then see only itself.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers.cache_utils import Cache

_FLAG = "gradient_checkpointing"  # of transformers' layers, and of its models


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
    checkpointing = _checkpointing(model) if model.training else []
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


def _checkpointing(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, _FLAG, False)]
