"""Two ways to read a text of any length with a trained model: cached segments and attention sinks.

    cached segments   Transformer-XL's recurrence at test time (Dai et al. 2019, sec. 3.1, arXiv:1901.02860): segments of L
                      tokens; in every layer, a segment also sees the keys of the M tokens before it, as computed with their
                      own segment. Positions continue. A token costs at most L + M keys and no second pass
    attention sinks   StreamingLLM (Xiao et al. 2023, sec. 3.2, arXiv:2309.17453): token by token, every layer keeps the first
                      s tokens and the last W − s, and counts distances within the kept tokens

The scored tokens are those of `evaluate.py`, so all losses of one text and one set of lengths can be compared. A stream starts
before its stretch, so that the first scored token has as much context as the last. Expected: cached segments at M = L are below
nonoverlapping at L, and near a sliding window of L + M, for methods that can handle distances of L + M; sinks keep a model that
attends to its first tokens from failing, but do not make it remember the text between them and the window.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_attn.nn import KVCache
from alibi_lab.lab.config import ConfigError, EvalConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.evaluation.evaluate import evaluate, mean_nats, scored_stretches
from alibi_lab.lab.evaluation.losses import Say, TokenLosses, columns, testing
from alibi_lab.lab.model.attention import LayerCache
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.method_checks import checked_curves
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.records import Curve, Curves, Json

SEGMENTS, SINKS = "cached segments", "attention sinks"


def all_curves(model: LanguageModel, corpus: Corpus, config: EvalConfig, *, say: Say | None = None) -> dict[str, Curve]:
    """All curves that the config requests on the text `corpus.valid`: those of `evaluate`, and "streams".

    Raises:
        CorpusError, ConfigError, EvaluationError, TaskError: see `evaluate` and `streams`.
    """
    found = evaluate(model, corpus.valid, config, encode=lambda text: corpus.tokenizer.encode(text).tolist(), say=say)
    return {**found, **({"streams": streams(model, corpus.valid, config)} if config.memory or config.sinks else {})}


def own_curves(method: type[PositionMethod], model: LanguageModel, corpus: Corpus, config: EvalConfig) -> Curves:
    """The curves of a method's own test, its hook `curves`: name -> columns of equal length.

    Args:
        model: a trained model, of this method or of another one.
        corpus: `corpus.train` is the model's training text, `corpus.valid` the text to test on.

    Raises:
        PositionError: the hook returns something else.
    """
    return checked_curves(method, method.curves(model, corpus, config))  # type: ignore[attr-defined]


def streams(model: LanguageModel, tokens: Tensor, config: EvalConfig) -> dict[str, list[Json]]:
    """The curve "streams" of a record: both modes at every length, as far as the config requests them.

    `kept` is the memory in addition to a segment of `length` tokens, or the sinks in a cache of `length` tokens. A mode that the
    position method does not support is None in every column.

    Raises:
        ConfigError: there is not enough text before a stretch.
        CorpusError: the text is shorter than one evaluation window.
    """
    stretches = scored_stretches(len(tokens), config.lengths[-1], config.tokens)
    modes = [*((SEGMENTS, kept) for kept in config.memory), *((SINKS, kept) for kept in config.sinks)]
    rows: list[tuple[Json, ...]] = []
    for length, (mode, kept) in itertools.product(config.lengths, modes):
        losses = None
        if mode == SEGMENTS and why_no_memory(model) is None:
            losses = cached_segments(model, tokens, stretches, length=length, memory=kept)
        elif mode == SINKS and why_no_sinks(model) is None:
            losses = attention_sinks(model, tokens, stretches, window=length, sinks=kept)
        values = (None, None) if losses is None else (mean_nats(losses), len(losses.target))
        rows.append((mode, length, kept, *values))
    return columns(("way", "length", "kept", "nats", "tokens"), rows)


def why_no_memory(model: LanguageModel) -> str | None:
    """Why the model cannot read cached segments; None if it can."""
    method = type(model.position)
    if method.bias is not PositionMethod.bias and not method.relative:
        return f"model.method is {model.config.method!r}, whose bias needs the start of a row, which cached segments do not have"
    if model.position.segment is not None:
        return f"model.method is {model.config.method!r}, which has its own memory"
    if model.position.max_positions is not None:
        return f"model.method is {model.config.method!r}, whose positions are limited, but positions of cached segments continue"
    return None


def why_no_sinks(model: LanguageModel) -> str | None:
    """Why the model cannot use attention sinks; None if it can."""
    method, name = type(model.position), model.config.method
    custom = any(getattr(method, hook) is not getattr(PositionMethod, hook) for hook in ("rotate", "attend"))
    if custom or not method.relative or method.per_layer or model.position.segment is not None:
        needed = "a bias of distances alone: none, alibi and its variants, t5, kerple, sandwich"
        return f"model.method is {name!r}; attention sinks count distances within the cache, which needs {needed}"
    return None


def cached_segments(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, memory: int
) -> TokenLosses:
    """Losses of the tokens in the stretches, read in segments of `length` with the keys of `memory` tokens before each.

    Raises:
        ConfigError: fewer than one token per segment, or a bias that depends on the start of a row.
    """
    if length < 1 or memory < 0:
        found = f"length is {length} and memory {memory}"
        raise ConfigError(f"{found}; pass a length of 1 or more and a memory of 0 or more")
    if why := why_no_memory(model):
        raise ConfigError(why)
    rows = _rows(model, tokens, stretches, memory)
    begins = range(memory % length or length, rows.shape[1] - 1, length)  # so that a segment starts with the stretch
    caches = [LayerCache() for _ in model.blocks]
    losses, dropped = [], 0
    with testing(model):
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
        ConfigError: the sinks fill the window, or positions are part of the keys and cannot move within a cache.
    """
    if not 0 <= sinks < window:
        raise ConfigError(f"window is {window} and sinks {sinks}; pass sinks from 0 to window − 1")
    if why := why_no_sinks(model):
        raise ConfigError(why)
    rows = _rows(model, tokens, stretches, window - 1)
    caches = [LayerCache(KVCache(max_tokens=window, sinks=sinks)) for _ in model.blocks]
    pairs = (rows[:, at : at + 2] for at in range(rows.shape[1] - 1))
    with testing(model):
        losses = [model(pair[:, :1], targets=pair[:, 1:], caches=caches).cpu() for pair in pairs]
    return _scored(torch.cat(losses, dim=1)[:, window - 1 :], stretches, start=window)


def _rows(model: LanguageModel, tokens: Tensor, stretches: Sequence[range], warm: int) -> Tensor:
    """[stretches, warm + 1 + tokens]: each stretch with the text before it; the first stretch limits the others.

    Raises:
        ConfigError: there is not enough text before a stretch.
    """
    if warm >= stretches[0].start:
        found = f"{warm} tokens are read before the scored ones but the text has {stretches[0].start - 1} there"
        raise ConfigError(f"{found}; pass a shorter memory or window, or longer eval.lengths")
    rows = [tokens[stretch.start - warm - 1 : stretch.stop] for stretch in stretches]
    return torch.stack(rows).to(model.device).long()


def _scored(losses: Tensor, stretches: Sequence[range], *, start: int) -> TokenLosses:
    target = torch.cat([torch.arange(stretch.start, stretch.stop) for stretch in stretches])
    position = torch.arange(start, start + losses.shape[1]).repeat(len(losses))
    return TokenLosses(target=target, position=position, loss_nats=losses.flatten())
