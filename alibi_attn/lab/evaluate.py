"""Per-token losses, and what is read from them: nonoverlapping, sliding window, by position.

The same tokens are scored at every length and in both ways, so that two numbers differ by the context only. They are
stretches of the largest length L_max, spread evenly over the text, each with L_max tokens before it to look back on.

* nonoverlapping at L (Press et al. 2022, sec. 2.2): a stretch is cut into pieces of L tokens, and the token at place p
  of its piece is predicted from the p inputs up to it. With longer pieces fewer tokens stand near a start: the loss falls
  although the model may use no more context (the "early token curse", appendix B).
* sliding window at L with stride S (appendix B; S = 1 in tables 13–15): windows of L inputs move by S, and only the
  last S predictions of each count, so that every token is predicted from L − S + 1 … L inputs.
* by position: the nonoverlapping losses at the largest length that the method can do, averaged by place in the piece.

Losses are in nats per token. Read next: `experiment.py`.
"""

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from alibi_attn.lab.config import EvalConfig
from alibi_attn.lab.data import CorpusError
from alibi_attn.lab.losses import TokenLosses, Window, token_losses
from alibi_attn.lab.memory import peak_memory_bytes, reset_peak_memory
from alibi_attn.lab.model import LanguageModel

Column: TypeAlias = list[float | None]


def evaluate(model: LanguageModel, tokens: Tensor, config: EvalConfig) -> dict[str, dict[str, Column]]:
    """The curves "by_length" and "by_position" of the model on the text, as records hold them.

    Lengths that the method has no positions for are None in every column. Speed and memory are those of the
    nonoverlapping pass; memory is the peak of the process (CPU) or of the allocator (GPU).

    Raises:
        CorpusError: the text is shorter than one evaluation window.
    """
    stretches = scored_stretches(len(tokens), config)
    limit = model.position.max_positions
    names = (
        "nonoverlapping_nats",
        "nonoverlapping_tokens",
        "sliding_nats",
        "sliding_tokens",
        "tokens_per_second",
        "peak_memory_bytes",
    )
    by_length: dict[str, Column] = {"length": list(config.lengths), **{name: [] for name in names}}
    by_position: dict[str, Column] = {"position": [], "loss_nats": [], "tokens": []}
    device = model.device
    warm = False
    for length in config.lengths:
        if limit is not None and length > limit:
            for name in names:
                by_length[name].append(None)
            continue
        if not warm:
            nonoverlapping(model, tokens, stretches[:1], length=length, batch_tokens=config.batch_tokens)
            warm = True
        measurable = reset_peak_memory(device)
        started = time.perf_counter()
        straight = nonoverlapping(model, tokens, stretches, length=length, batch_tokens=config.batch_tokens)
        seconds = time.perf_counter() - started
        peak = peak_memory_bytes(device) if measurable else None
        stride = stride_at(length, config.stride)
        slid = sliding(model, tokens, stretches, length=length, stride=stride, batch_tokens=config.batch_tokens)
        values = (
            mean_nats(straight),
            len(straight.target),
            mean_nats(slid),
            len(slid.target),
            len(straight.target) / seconds,
            peak,
        )
        for name, value in zip(names, values, strict=True):
            by_length[name].append(value)
        by_position = loss_by_position(straight)
    return {"by_length": by_length, "by_position": by_position}


def scored_stretches(text_tokens: int, config: EvalConfig) -> list[range]:
    """Which tokens are predicted: ranges of the largest length, evenly spread; fewer than asked for in a short text.

    >>> scored_stretches(100, EvalConfig(lengths=(4, 8), tokens=16))
    [range(8, 16), range(92, 100)]

    Raises:
        CorpusError: not even one fits.
    """
    longest = config.lengths[-1]
    room = text_tokens - longest  # the first token that has a full window before it is number `longest`
    count = min(-(-config.tokens // longest), room // longest)
    if count < 1:
        raise CorpusError(
            f"the test text has {text_tokens} tokens but one evaluation window of {longest} needs {2 * longest}: {longest} "
            "to score and as many before them; pass more text, a larger data.valid_share, or shorter eval.lengths"
        )
    gaps = max(count - 1, 1)
    begins = [longest + index * (room - longest) // gaps for index in range(count)]
    return [range(begin, begin + longest) for begin in begins]


def stride_at(length: int, stride: int | None) -> int:
    """The stride in use at a length: the one asked for, at most the length; a quarter of the length where none is."""
    return max(1, length // 4) if stride is None else min(stride, length)


def nonoverlapping(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, batch_tokens: int
) -> TokenLosses:
    """Losses of the tokens in the stretches, each predicted within its own piece of `length` tokens."""
    windows = [
        Window(begin - 1, stop - 1, stop - begin)
        for stretch in stretches
        for begin in range(stretch.start, stretch.stop, length)
        for stop in [min(begin + length, stretch.stop)]
    ]
    return token_losses(model, tokens, windows, batch_tokens=batch_tokens)


def sliding(
    model: LanguageModel, tokens: Tensor, stretches: Sequence[range], *, length: int, stride: int, batch_tokens: int
) -> TokenLosses:
    """Losses of the tokens in the stretches, each predicted from the `length − stride + 1` … `length` inputs before it."""
    windows = [
        Window(begin - 1 + stride - length, stop - 1, stop - begin)
        for stretch in stretches
        for begin in range(stretch.start, stretch.stop, stride)
        for stop in [min(begin + stride, stretch.stop)]
    ]
    return token_losses(model, tokens, windows, batch_tokens=batch_tokens)


def mean_nats(losses: TokenLosses) -> float:
    """Nats per token over all that were scored."""
    return float(losses.loss_nats.double().mean())


def loss_by_position(losses: TokenLosses) -> dict[str, Column]:
    """Mean loss in buckets of positions that grow by √2; "position" is the last one of the bucket, so 1, 2, 3, 4, 6, 8, 11, …"""
    longest = int(losses.position.max())
    edges = sorted({min(round(2 ** (half / 2)), longest) for half in range(2 * longest.bit_length() + 1)})
    bucket = torch.bucketize(losses.position, torch.tensor(edges))
    counts = torch.bincount(bucket, minlength=len(edges))
    sums = torch.bincount(bucket, weights=losses.loss_nats.double(), minlength=len(edges))
    filled = [index for index in range(len(edges)) if counts[index]]
    return {
        "position": [edges[index] for index in filled],
        "loss_nats": [float(sums[index] / counts[index]) for index in filled],
        "tokens": [int(counts[index]) for index in filled],
    }
