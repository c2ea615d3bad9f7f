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

Losses are in nats per token. Next: `experiment.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab.lab.clock import clock
from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import CorpusError
from alibi_lab.lab.data.tasks import Encode
from alibi_lab.lab.evaluation.context_use import has_positions, passkey, recall, symbols
from alibi_lab.lab.evaluation.losses import MOST_PARTS, Column, Say, TokenLosses, columns, token_losses
from alibi_lab.lab.model.language_model import LanguageModel

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
    names = (*_LOSSES, *_SPEED, *(_WINDOWED if config.windowed else ()))
    rows: list[tuple[float | None, ...]] = []
    parts: list[tuple[float | None, ...]] = []
    by_position: dict[str, Column] = {"position": [], "loss_nats": [], "tokens": []}
    if has_positions(model, length := config.lengths[0]):  # warm-up: the first pass of a process is slow
        nonoverlapping(model, tokens, stretches[:1], length=length, batch_tokens=config.batch_tokens, say=say)
    for length in config.lengths:
        row: Sequence[float | None] = [None] * len(names)
        if has_positions(model, length):
            row, straight, slid = _at_length(model, tokens, stretches, length, config, say)
            by_position = loss_by_position(straight)
            parts += [(length, *part) for part in zip(*loss_by_part(straight, slid).values(), strict=True)]
        rows.append((length, *row))
    curves = {"by_length": columns(("length", *names), rows), "by_position": by_position}
    curves["by_part"] = columns(("length", *_BY_PART), parts)
    for task in config.tasks:
        if task == "passkey":
            curves[task] = passkey(model, encode, config, say=say)
        elif task == "recall":
            curves[task] = recall(model, tokens.unique(), config, say=say)
        else:
            curves |= symbols(model, task, tokens.unique(), config, say=say)
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
    return token_losses(model, tokens, windows, **options)


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


def _at_length(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], length: int, config: EvalConfig, say: Say | None
) -> tuple[list[float | None], TokenLosses, TokenLosses]:
    """The row of "by_length", and the losses of the nonoverlapping and of the sliding pass."""
    options: Any = {"length": length, "batch_tokens": config.batch_tokens, "say": say}
    stretched = model.stretched(config.stretch, length)
    measurable = reset_peak_memory(model.device)
    now = clock(model.device)
    started = now()
    straight = nonoverlapping(stretched, tokens, stretches, **options)
    seconds = now() - started
    peak = peak_memory_bytes(model.device) if measurable else None
    slid = sliding(stretched, tokens, stretches, stride=stride_at(length, config.stride), **options)
    scored = len(straight.target)
    row = [mean_nats(straight), scored, mean_nats(slid), len(slid.target), scored / seconds, peak]
    if config.windowed:  # up to the trained length, the windowed pass is the nonoverlapping one
        cut = straight
        if length > model.trained_length:  # not stretched: no distance exceeds the trained length
            cut = nonoverlapping(model, tokens, stretches, attention_window=model.trained_length, **options)
        row += [mean_nats(cut), len(cut.target)]
    return row, straight, slid
