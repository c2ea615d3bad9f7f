"""Reads what the attention layers of a model compute during its forward passes: `record_attention` and `watched`.

Works on patched models, on `ALiBiForCausalLM` and, for `record_attention`, on our encoders: the attention function of their
layers can be replaced per layer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alibi_attn.attention.kept import Kept, attend
from alibi_attn.attention.rows import Rows, attention_rows
from alibi_attn.hf.readers.encoder.layers import ALiBiBertSelfAttention
from alibi_attn.nn.replacement import replaced, restore

See = Callable[[int, Tensor, Tensor, Tensor, float], None]


@contextlib.contextmanager
def record_attention(
    model: nn.Module, *, rows: Rows, layers: Sequence[int] | None = None
) -> Iterator[list[dict[int, Tensor]]]:
    """Within the block, forward passes also compute the exact attention weights of a few queries, in memory linear in S.

    They are those before dropout, in fp32 (fp64 for fp64 models), and differentiable. The model's outputs are the same to
    rounding: layers run one by one, and padded texts of an encoder stay in their rows.

    Args:
        model: patched by `patch`, an `ALiBiForCausalLM`, or an encoder such as `ALiBiBertModel`.
        rows: indices among the queries of each pass, as for `alibi_attn.attention_rows`: of a batch's padded rows, and of the new
            tokens if there is a cache.
        layers: their indices, negative ones from the end; None = all.

    Yields:
        A list with a dict for each forward pass so far, from layers to weights [B, H, R, S]; `generate` makes one pass per token.

    Raises:
        ValueError: no layer uses alibi_attention, another tool has replaced the model's attention, the model reproduces a
            checkpoint's rounding, a layer does not exist, or activation checkpointing would compute layers twice.

    >>> import torch
    >>> from alibi_attn.hf import patch
    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50))
    >>> with patch(model), record_attention(model, rows=[-1], layers=[0]) as passes:
    ...     output = model(torch.arange(10)[None])
    >>> passes[0][0].shape
    torch.Size([1, 4, 1, 10])
    """
    found = _layers(model, encoders=True)
    wanted = range(len(found)) if layers is None else layers
    if any(isinstance(at, bool) or not isinstance(at, int) or not -len(found) <= at < len(found) for at in wanted):
        raise ValueError(
            f"layers is {layers!r} but {type(model).__name__} has {len(found)} attention layers; pass indices from "
            f"{-len(found)} to {len(found) - 1}"
        )
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "activation checkpointing computes layers again in the backward pass, which would be recorded too; turn it off or "
            "call model.eval() first"
        )
    passes: list[dict[int, Tensor]] = []
    chosen = {at % len(found) for at in wanted}
    attends = {at: functools.partial(_record_and_attend, passes, at, rows) for at in chosen}
    # All layers are replaced, because an encoder must not pack the rows of the others either.
    as_before = functools.partial(attend)  # another function than `attend`, so that layers see that they are watched
    with _replaced(model, found, [attends.get(at, as_before) for at in range(len(found))], "record_attention"):
        yield passes


@contextlib.contextmanager
def watched(model: nn.Module, see: See) -> Iterator[int]:
    """Within the block, every attention layer calls `see(layer, query, key, slopes, scale)` before it attends.

    Args:
        see: receives the layer's index in the model, query [B, H, T, D], key [B, K, S, D], slopes [H] and the factor of q·k.

    Yields:
        The number of layers.

    Raises:
        ValueError: as `record_attention`; and in a forward pass, several texts in one row or holes in the mask.
    """
    found = _layers(model, encoders=False)
    attends = [functools.partial(_call_and_attend, see, number) for number in range(len(found))]
    with _replaced(model, found, attends, "watched"):
        yield len(found)


def _layers(model: nn.Module, *, encoders: bool) -> list[nn.Module]:
    """The attention layers, in the order of the model's modules."""
    marks = ("alibi_settings", "table_settings") if encoders else ("alibi_settings",)
    layers = [module for module in model.modules() if any(hasattr(module, mark) for mark in marks)]
    if encoders:
        layers = layers or [module for module in model.modules() if isinstance(module, ALiBiBertSelfAttention)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that uses alibi_attention; pass a model patched by alibi_attn.hf.patch, or an "
            f"ALiBiForCausalLM{' or ALiBiBertModel' if encoders else ''}"
        )
    if any("attend" in vars(layer) for layer in layers):
        raise ValueError(
            "the model's attention has been replaced (by context_parallel or record_attention); undo that first"
        )
    if any(getattr(vars(layer).get("alibi_settings"), "numerics", "exact") != "exact" for layer in layers):
        raise ValueError(
            'a model with numerics="checkpoint" does not compute its attention with alibi_attention; use numerics="exact"'
        )
    return layers


@contextlib.contextmanager
def _replaced(
    model: nn.Module, layers: Sequence[nn.Module], attends: Sequence[Callable[..., Tensor]], what: str
) -> Iterator[None]:
    names = {module: name for name, module in model.named_modules()}
    changes = [replaced(layer, names[layer], "attend", attend) for layer, attend in zip(layers, attends, strict=True)]
    try:
        yield
    finally:
        restore(changes, f"{what}(model)")


def _record_and_attend(
    passes: list[dict[int, Tensor]],
    number: int,
    rows: Rows,
    query: Tensor,
    kept: Sequence[Kept],
    slopes: Tensor | None = None,
    **given: Any,
) -> Tensor:
    if not passes or number in passes[-1]:
        passes.append({})
    [keys] = kept
    options = {name: x for name, x in given.items() if x is not None and name not in ("dropout_p", "backend")}
    if "positions" not in options:
        options["query_offset"] = keys.first
    recorded = _rows_with_table if "table" in options else functools.partial(attention_rows, slopes=slopes)
    passes[-1][number] = recorded(query, keys.key, rows=rows, **options)
    return attend(query, kept, slopes, **given)


def _rows_with_table(
    query: Tensor, key: Tensor, *, table: Tensor, rows: Rows, causal: bool, query_offset: int, **options: Any
) -> Tensor:
    """`attention_rows` with t[h, i − j]: for one query, the table is a bias per key."""
    at = torch.arange(key.shape[2], device=key.device)
    none, middle = [0.0] * query.shape[1], 0 if causal else table.shape[1] // 2
    weights = []
    for row in torch.arange(query.shape[2])[rows].tolist():
        distance = row + query_offset - at
        bias = table[:, (distance + middle).clamp(min=0)]  # a causal query does not see the keys of negative distance
        weights.append(
            attention_rows(
                query, key, none, rows=[row], key_bias=bias, causal=causal, query_offset=query_offset, **options
            )
        )
    return torch.cat(weights, 2) if weights else attention_rows(query, key, none, rows=[])


def _call_and_attend(
    see: See, number: int, query: Tensor, kept: Sequence[Kept], slopes: Tensor | None = None, **given: Any
) -> Tensor:
    if slopes is None:
        raise ValueError("the bias of this model is not ALiBi's: only queries, keys and slopes are watched")
    if any(given.get(name) is not None for name in ("segment_ids", "key_bias", "prefix_len", "positions")):
        raise ValueError(
            "pass one text per row, no prefix, no positions and no holes in the mask: only queries, keys and slopes are "
            "watched"
        )
    [keys] = kept
    see(number, query, keys.key, slopes, given["scale"])
    return attend(query, kept, slopes, **given)
