"""Per-token losses and their summaries: nonoverlapping, sliding window, by position.

The same tokens are scored at every length and in every mode, so that two numbers differ by the context only. They are
stretches of the largest length L_max, spread evenly over the text, each with L_max tokens of context before it.

* nonoverlapping at L (Press et al. 2022, sec. 2.2): a stretch is cut into pieces of L tokens, and the token at place p
  of its piece is predicted from the p inputs up to it. With longer pieces, fewer tokens are near a start: the loss falls
  although the model may use no more context (the "early token curse", appendix B).
* sliding window at L with stride S (appendix B; S = 1 in tables 13–15): windows of L inputs move by S, and only the
  last S predictions of each count, so that every token is predicted from L − S + 1 … L inputs.
* windowed at L: the nonoverlapping pass at L, but in every layer a token sees only the last L₀ tokens, L₀ the trained length.
  If this is as good, attending further than in training gained nothing; if it is better, it hurt. With n layers, information
  may still come from n·(L₀ − 1) tokens back. At lengths up to L₀ it equals the nonoverlapping pass.
* by position: the nonoverlapping losses at the largest length that the method supports, averaged by place in the piece.
* by part: the scored tokens in text order, cut into at most 32 equal parts of at least 128 tokens, with the mean loss of each
  part at every length. The parts are the same for all lengths and models, so that differences can be paired; their variance
  estimates how a number would vary over other text of this kind.

Two more ways read a text of any length as a stream:

* cached segments: Transformer-XL's recurrence at test time (Dai et al. 2019, sec. 3.1, arXiv:1901.02860): segments of L tokens;
  in every layer, a segment also sees the keys of the M tokens before it, as computed with their own segment. Positions
  continue. A token costs at most L + M keys and no second pass.
* attention sinks: StreamingLLM (Xiao et al. 2023, sec. 3.2, arXiv:2309.17453): token by token, every layer keeps the first s
  tokens and the last W − s, and counts distances within the kept tokens.

A stream starts before its stretch, so that the first scored token has as much context as the last. Expected: cached segments at
M = L are below nonoverlapping at L, and near a sliding window of L + M, for methods that can handle distances of L + M; sinks
keep a model that attends to its first tokens from failing, but do not make it remember the text between them and the window.

Losses are in nats per token. Next: `experiment.py`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_attn.nn import KVCache
from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab.lab.clock import clock
from alibi_lab.lab.config import ConfigError, EvalConfig
from alibi_lab.lab.data.corpus import Corpus, CorpusError
from alibi_lab.lab.data.tasks import Encode
from alibi_lab.lab.evaluation import losses as predicted
from alibi_lab.lab.evaluation.losses import MOST_PARTS, Column, Rows, Say, TokenLosses, columns, has_positions, testing
from alibi_lab.lab.model.attention import LayerCache
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.method_checks import checked_curves
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.records import Curve, Curves, Json

SEGMENTS, SINKS = "cached segments", "attention sinks"

_LOSSES = ("nonoverlapping_nats", "nonoverlapping_tokens", "sliding_nats", "sliding_tokens")
_SPEED = ("tokens_per_second", "peak_memory_bytes")
_WINDOWED = ("windowed_nats", "windowed_tokens")
_BY_PART = ("part", "tokens", "nonoverlapping_nats", "sliding_nats")
_LEAST_PART_TOKENS = 128  # long enough that neighboring parts are nearly independent


def evaluate(
    model: LanguageModel, tokens: Tensor, config: EvalConfig, *, encode: Encode = str.encode, say: Say | None = None
) -> dict[str, dict[str, Column]]:
    """The curves "by_length", "by_position" and "by_part" of the model on the text, and those of `config.tasks`.

    Lengths beyond the method's positions are None in every column. Speed and memory are those of the nonoverlapping pass;
    memory is the peak of the process (CPU) or of the allocator (GPU).

    Args:
        encode: text to tokens, as for the model's training text; passkey uses it.
        say: receives a message if a batch did not fit in memory and was halved.

    Raises:
        CorpusError: the text is shorter than one evaluation window.
        ConfigError: the method does not support the stretch.
        EvaluationError: one window does not fit in memory.
        TaskError: the tokens do not allow a task.
    """
    stretches = scored_stretches(len(tokens), config.lengths[-1], config.tokens)
    options: Any = {"batch_tokens": config.batch_tokens, "say": say}
    by_position: dict[str, Column] = {"position": [], "loss_nats": [], "tokens": []}
    parts: list[tuple[float | None, ...]] = []

    def score(stretched: LanguageModel, length: int) -> Rows:
        nonlocal by_position
        measurable, now = reset_peak_memory(model.device), clock(model.device)
        started = now()
        straight = nonoverlapping(stretched, tokens, stretches, length=length, **options)
        seconds = now() - started
        peak = peak_memory_bytes(model.device) if measurable else None
        stride, scored = stride_at(length, config.stride), len(straight.target)
        slid = sliding(stretched, tokens, stretches, length=length, stride=stride, **options)
        by_position = loss_by_position(straight)
        parts.extend((length, *part) for part in zip(*loss_by_part(straight, slid).values(), strict=True))
        row = [mean_nats(straight), scored, mean_nats(slid), len(slid.target), scored / seconds, peak]
        if config.windowed:  # up to the trained length, the windowed pass is the nonoverlapping one
            cut, most = straight, model.trained_length
            if length > most:  # not stretched: no distance exceeds the trained length
                cut = nonoverlapping(model, tokens, stretches, length=length, attention_window=most, **options)
            row += [mean_nats(cut), len(cut.target)]
        yield row

    if has_positions(model, length := config.lengths[0]):  # warm-up: the first pass of a process is slow
        nonoverlapping(model, tokens, stretches[:1], length=length, **options)
    names = (*_LOSSES, *_SPEED, *(_WINDOWED if config.windowed else ()))
    by_length = predicted.table(model, config, names, None, score)
    curves = {"by_length": by_length, "by_position": by_position, "by_part": columns(("length", *_BY_PART), parts)}
    for task in config.tasks:
        if task == "passkey":
            curves[task] = predicted.passkey(model, encode, config, say=say)
        elif task == "recall":
            curves[task] = predicted.recall(model, tokens.unique(), config, say=say)
        else:
            curves |= predicted.symbols(model, task, tokens.unique(), config, say=say)
    return curves


def validation_nats(
    model: LanguageModel, tokens: Tensor, *, length: int, tokens_to_score: int, batch_tokens: int
) -> tuple[float, int]:
    """Nats per token, nonoverlapping at one length, and the number of scored tokens: the validation during a training.

    Draws no random numbers and leaves the model in training mode.

    Raises:
        CorpusError: the text is shorter than twice the length.
    """
    stretches = scored_stretches(len(tokens), length, tokens_to_score)
    losses = nonoverlapping(model, tokens, stretches, length=length, batch_tokens=batch_tokens)
    return mean_nats(losses), len(losses.target)


def scored_stretches(text_tokens: int, longest: int, tokens: int = 1) -> list[range]:
    """The scored tokens: evenly spread ranges of the largest length; fewer than requested in a short text.

    >>> scored_stretches(100, 8, 16)
    [range(8, 16), range(92, 100)]

    Raises:
        CorpusError: the text is too short for one.
    """
    room = text_tokens - longest  # token `longest` is the first with a full window before it
    count = min(-(-tokens // longest), room // longest)
    if count < 1:
        found = f"the test text has {text_tokens} tokens but one evaluation window of {longest} needs {2 * longest}"
        advice = "pass more text, a larger data.valid_share, or shorter eval.lengths"
        raise CorpusError(f"{found}: {longest} to score and as many before them; {advice}")
    gaps = max(count - 1, 1)
    begins = [longest + index * (room - longest) // gaps for index in range(count)]
    return [range(begin, begin + longest) for begin in begins]


def stride_at(length: int, stride: int | None) -> int:
    """The stride at a length: the given one, at most the length; by default a quarter of the length."""
    return max(1, length // 4) if stride is None else min(stride, length)


def nonoverlapping(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, **options: Any
) -> TokenLosses:
    """Losses of the tokens in the stretches, each predicted within its own piece of `length` tokens.

    Args:
        options: of `token_losses`.
    """
    return sliding(model, tokens, stretches, length=length, stride=length, **options)


def sliding(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, stride: int, **options: Any
) -> TokenLosses:
    """Losses of the tokens in the stretches, each predicted from the `length − stride + 1` … `length` inputs before it.

    Args:
        options: of `token_losses`.
    """
    pieces = [stretch[at : at + stride] for stretch in stretches for at in range(0, len(stretch), stride)]
    windows = [(piece.start - 1 + stride - length, piece.stop - 1, len(piece)) for piece in pieces]
    return predicted.token_losses(model, tokens, windows, **options)


def mean_nats(losses: TokenLosses) -> float:
    """The mean over all scored tokens, in nats."""
    return float(losses.loss_nats.double().mean())


def loss_by_position(losses: TokenLosses) -> dict[str, Column]:
    """Mean loss in buckets of positions that grow by √2; "position" is the last one of a bucket: 1, 2, 3, 4, 6, 8, 11, …"""
    longest = int(losses.position.max())
    edges = torch.tensor(sorted({min(round(2 ** (half / 2)), longest) for half in range(2 * longest.bit_length() + 1)}))
    bucket = torch.bucketize(losses.position, edges)
    counts = torch.bincount(bucket, minlength=len(edges))
    sums = torch.bincount(bucket, weights=losses.loss_nats.double(), minlength=len(edges))
    found = {"position": edges, "loss_nats": sums / counts, "tokens": counts}
    return {name: column[counts > 0].tolist() for name, column in found.items()}


def loss_by_part(straight: TokenLosses, slid: TokenLosses) -> dict[str, Column]:
    """Mean losses of consecutive parts of the scored tokens, nonoverlapping and sliding; both scored the same tokens."""
    count = max(1, min(MOST_PARTS, len(straight.target) // _LEAST_PART_TOKENS))
    pairs = zip(*(losses.loss_nats.double().tensor_split(count) for losses in (straight, slid)), strict=True)
    rows = [(n, len(pair[0]), *(round(float(part.mean()), 6) for part in pair)) for n, pair in enumerate(pairs)]
    return columns(_BY_PART, rows)


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
    losses = []
    with testing(model):
        for begin, end in itertools.pairwise([0, *begins, rows.shape[1] - 1]):
            part = rows[:, begin : end + 1]
            losses.append(model(part[:, :-1], targets=part[:, 1:], caches=caches).cpu())
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
