"""Two ways to read a text of any length with a trained model that was made for neither: what its losses are then.

    cached segments   Transformer-XL's recurrence at test time (Dai et al. 2019, sec. 3.1, arXiv:1901.02860): the text in segments
                      of L tokens; in every layer a segment also sees the keys of the M tokens before it, as they were
                      computed with their own segment. Positions go on. A token costs at most L + M keys and no second pass
    attention sinks   StreamingLLM (Xiao et al. 2023, sec. 3.2, arXiv:2309.17453): token by token, every layer keeps the first
                      s tokens and the last W − s, and counts distances inside of what it keeps

The same tokens are scored as in `evaluate.py`, so that all losses of one text and one set of lengths can be compared. A stream
begins some tokens before its stretch, so that the first token scored has what the last one has. Expected: cached segments at
M = L lie below nonoverlapping at L, and near a sliding window of L + M, for methods that bear such distances; sinks keep a model
that leans on its first tokens from falling apart, and do not make it remember what lies between them and the window.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.lab.attention import LayerCache
from alibi_attn.lab.config import ConfigError, EvalConfig
from alibi_attn.lab.evaluate import mean_nats, scored_stretches
from alibi_attn.lab.hooks import PositionMethod
from alibi_attn.lab.losses import TokenLosses
from alibi_attn.lab.model import LanguageModel
from alibi_attn.nn import KVCache
from alibi_attn.records import Json


def streams(
    model: LanguageModel, tokens: Tensor, config: EvalConfig, *, memory: int | None, sinks: int | None
) -> dict[str, list[Json]]:
    """The curve "streams" of a record: both ways at every length of the config, as far as they are asked for.

    `kept` is the memory beside a segment of `length` tokens, or the sinks in a cache of `length` tokens.

    Args:
        memory, sinks: None = not this way.

    Raises:
        ConfigError: see below.
        CorpusError: the text is shorter than one evaluation window.
    """
    stretches = scored_stretches(len(tokens), config)
    rows: list[tuple[str, int, int, TokenLosses]] = []
    for length in config.lengths:
        if memory is not None:
            losses = cached_segments(model, tokens, stretches, length=length, memory=memory)
            rows.append(("cached segments", length, memory, losses))
        if sinks is not None:
            losses = attention_sinks(model, tokens, stretches, window=length, sinks=sinks)
            rows.append(("attention sinks", length, sinks, losses))
    return {
        "way": [way for way, _, _, _ in rows],
        "length": [length for _, length, _, _ in rows],
        "kept": [kept for _, _, kept, _ in rows],
        "nats": [mean_nats(losses) for _, _, _, losses in rows],
        "tokens": [len(losses.target) for _, _, _, losses in rows],
    }


def cached_segments(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, memory: int
) -> TokenLosses:
    """Losses of the tokens in the stretches, read in segments of `length` with the keys of `memory` tokens before each.

    Raises:
        ConfigError: fewer than one token a segment, or a bias that counts from the start of a row.
    """
    if length < 1 or memory < 0:
        raise ConfigError(
            f"length is {length} and memory {memory}; pass a length of 1 or more and a memory of 0 or more"
        )
    method = type(model.position)
    if method.bias is not PositionMethod.bias and not method.relative:
        raise ConfigError(
            f"model.method is {model.config.method!r}, whose bias counts from the start of a row, which cached segments have not"
        )
    rows = _rows(model, tokens, stretches, memory)
    begins = range(memory % length or length, rows.shape[1] - 1, length)  # a segment begins where the stretch does
    caches = [LayerCache() for _ in model.blocks]
    losses, dropped = [], 0
    with torch.inference_mode():
        for begin, end in itertools.pairwise([0, *begins, rows.shape[1] - 1]):
            part = rows[:, begin : end + 1]
            losses.append(model(part[:, :-1], targets=part[:, 1:], caches=caches, dropped=dropped).cpu())
            dropped += max(len(caches[0]) - memory, 0)
            caches = [cache.last(memory) for cache in caches]
    return _scored(torch.cat(losses, dim=1)[:, memory:], stretches, start=1)


def attention_sinks(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, window: int, sinks: int = 4
) -> TokenLosses:
    """Losses of the tokens in the stretches, each predicted from the first `sinks` tokens of its stream and the last of `window`.

    Raises:
        ConfigError: no room beside the sinks, or positions that are part of the keys and cannot move inside of a cache.
    """
    if not 0 <= sinks < window:
        raise ConfigError(f"window is {window} and sinks {sinks}; pass sinks from 0 to window − 1")
    method = type(model.position)
    if method.rotate is not PositionMethod.rotate or not method.relative or method.per_layer:
        raise ConfigError(
            f"model.method is {model.config.method!r}; attention sinks count distances anew inside of the cache, which needs a "
            "bias of distances alone: none, alibi and its kin, t5, kerple, sandwich"
        )
    rows = _rows(model, tokens, stretches, window - 1)
    caches = [LayerCache(KVCache(max_tokens=window, sinks=sinks)) for _ in model.blocks]
    losses = []
    with torch.inference_mode():
        for at in range(rows.shape[1] - 1):
            losses.append(model(rows[:, at : at + 1], targets=rows[:, at + 1 : at + 2], caches=caches).cpu())
    return _scored(torch.cat(losses, dim=1)[:, window - 1 :], stretches, start=window)


def _rows(model: LanguageModel, tokens: Tensor, stretches: Sequence[range], warm: int) -> Tensor:
    """[stretches, warm + 1 + tokens]: each stretch with what its stream reads first; the first stretch bounds the rest.

    Raises:
        ConfigError: there is not so much text before a stretch.
    """
    if warm >= stretches[0].start:
        raise ConfigError(
            f"{warm} tokens are read before the scored ones but the text has {stretches[0].start - 1} there; pass a shorter "
            "memory or window, or longer eval.lengths"
        )
    rows = [tokens[stretch.start - warm - 1 : stretch.stop] for stretch in stretches]
    return torch.stack(rows).to(model.device).long()


def _scored(losses: Tensor, stretches: Sequence[range], *, start: int) -> TokenLosses:
    target = torch.cat([torch.arange(stretch.start, stretch.stop) for stretch in stretches])
    position = torch.arange(start, start + losses.shape[1]).repeat(len(losses))
    return TokenLosses(target=target, position=position, loss_nats=losses.flatten())
