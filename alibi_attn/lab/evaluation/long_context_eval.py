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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alibi_attn.lab.config import ConfigError, EvalConfig
from alibi_attn.lab.data.tasks import Encode, encode_bytes
from alibi_attn.lab.evaluation.evaluate import evaluate, mean_nats, scored_stretches
from alibi_attn.lab.evaluation.losses import Say, TokenLosses
from alibi_attn.lab.model.attention import LayerCache
from alibi_attn.lab.model.language_model import LanguageModel
from alibi_attn.lab.model.position_method import PositionMethod
from alibi_attn.nn import KVCache
from alibi_attn.records import Json

SEGMENTS, SINKS = "cached segments", "attention sinks"


def all_curves(
    model: LanguageModel, tokens: Tensor, config: EvalConfig, *, encode: Encode = encode_bytes, say: Say | None = None
) -> dict[str, Mapping[str, Sequence[Json]]]:
    """Every curve that the config asks for: those of `evaluate`, and "streams".

    Raises:
        CorpusError, ConfigError, EvaluationError, TaskError: see `evaluate` and `streams`.
    """
    found: dict[str, Mapping[str, Sequence[Json]]] = {**evaluate(model, tokens, config, encode=encode, say=say)}
    return found | {"streams": streams(model, tokens, config)} if config.memory or config.sinks else found


def streams(model: LanguageModel, tokens: Tensor, config: EvalConfig) -> dict[str, list[Json]]:
    """The curve "streams" of a record: both ways at every length of the config, as far as it asks for them.

    `kept` is the memory beside a segment of `length` tokens, or the sinks in a cache of `length` tokens. A way that the model's
    method cannot be read in is None in every column.

    Raises:
        ConfigError: there is not so much text before a stretch.
        CorpusError: the text is shorter than one evaluation window.
    """
    stretches = scored_stretches(len(tokens), config)
    asked = [*((SEGMENTS, kept) for kept in config.memory), *((SINKS, kept) for kept in config.sinks)]
    possible = {SEGMENTS: why_no_memory(model) is None, SINKS: why_no_sinks(model) is None}
    rows: list[tuple[Json, ...]] = []
    for length in config.lengths:
        for way, kept in asked:
            found: tuple[Json, ...] = None, None
            if possible[way]:
                losses = (
                    cached_segments(model, tokens, stretches, length=length, memory=kept)
                    if way == SEGMENTS
                    else attention_sinks(model, tokens, stretches, window=length, sinks=kept)
                )
                found = mean_nats(losses), len(losses.target)
            rows.append((way, length, kept, *found))
    return {name: [row[at] for row in rows] for at, name in enumerate(("way", "length", "kept", "nats", "tokens"))}


def why_no_memory(model: LanguageModel) -> str | None:
    """Why the model cannot be read in cached segments; None where it can."""
    method = type(model.position)
    if method.bias is not PositionMethod.bias and not method.relative:
        return f"model.method is {model.config.method!r}, whose bias counts from the start of a row; cached segments have none"
    if model.position.max_positions is not None:
        return f"model.method is {model.config.method!r}, whose positions end, and in cached segments they go on"
    return None


def why_no_sinks(model: LanguageModel) -> str | None:
    """Why the model cannot be read with attention sinks; None where it can."""
    method = type(model.position)
    if method.rotate is not PositionMethod.rotate or not method.relative or method.per_layer:
        return (
            f"model.method is {model.config.method!r}; attention sinks count distances anew inside of the cache, which needs a "
            "bias of distances alone: none, alibi and its kin, t5, kerple, sandwich"
        )
    return None


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
    if why := why_no_memory(model):
        raise ConfigError(why)
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
    if why := why_no_sinks(model):
        raise ConfigError(why)
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
