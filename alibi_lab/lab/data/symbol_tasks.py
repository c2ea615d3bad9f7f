"""Symbol tasks: associative recall, needles, copying, a one-bit memory. The preceding tokens determine every answer.

    mqar        8 keys, each followed by its value; later every key occurs again, and its value must follow
                (Arora et al. 2023, Zoology, arXiv:2312.04927)
    needles     4 keys with their values, at random places in noise; questions for all of them at the end (the
                multi-key needles of Hsieh et al. 2024, RULER, arXiv:2404.06654, where the others are distractors)
    copy        a random string over 63 symbols, repeated after each separator (Jelassi et al. 2024, arXiv:2402.01032)
    flip-flop   pairs of an instruction and a bit: "read" is followed by the bit that was last written, "ignore" by
                any bit (Liu et al. 2023, arXiv:2306.00946)

Documents are [N, n] tokens below 64 that depend only on the generator, with a mask [N, n] of the tokens that are
answers. In tests, answers are as far from their sources as n allows: the keys of mqar are at the start and the
questions at the end, a string is half of the document, and a long document has as many written bits as a short one.
In training, the distances are random up to that maximum, and questions repeat until the end. `CHANCE` is the share of
correct answers of a model that knows only the format. Read next: `context_use.py`.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from alibi_lab.lab.config import SymbolTask

Documents: TypeAlias = tuple[Tensor, Tensor]

SYMBOLS = 64
CHANCE: Mapping[SymbolTask, float] = {"mqar": 1 / 16, "needles": 1 / 16, "copy": 1 / 63, "flip-flop": 1 / 2}

_KEYS, _VALUES, _KINDS = 32, 48, 16  # the first key, the first value, and the number of each; below 30 is noise
_MARK, _ASK = 30, 31
_PAIRS, _NEEDLES = 8, 4
_SEPARATOR, _SHORTEST_STRING = 63, 4
_WRITE, _READ, _IGNORE = 2, 3, 4
_WRITES = 3.2  # expected number per document; the number of reads is the same
_MOST_WRITTEN = 0.1  # the largest share of pairs that write, and that read; then 0.8 are ignored, as in the paper


class TaskError(ValueError):
    """A task that does not fit in the given length or alphabet."""


def symbol_documents(task: SymbolTask, count: int, length: int, generator: torch.Generator, varied: bool) -> Documents:
    """Documents [count, length] int64, and a mask of the tokens that are answers.

    Args:
        varied: draw distances up to the largest, for training; otherwise always the largest.

    Raises:
        TaskError: the task does not fit in `length` tokens.
    """
    make, least = _TASKS[task]
    if length < least:
        raise TaskError(f"{task} has no room in {length} tokens; pass {least} or more")
    return make(count, length, generator, varied)


def shortest(task: SymbolTask) -> int:
    """The minimum number of tokens of a document."""
    return _TASKS[task][1]


def _mqar(count: int, length: int, generator: torch.Generator, varied: bool) -> Documents:
    """Pairs, noise, and questions until the end: every key once, or repeatedly if the noise is shorter."""
    keys, values = _pairs(count, _PAIRS, generator)
    widest = length - 4 * _PAIRS
    gap = _distances(widest, count, generator, varied)
    gap += (widest - gap) % 2  # no question is cut
    questions = (length - 2 * _PAIRS) // (2 * _PAIRS) + 1
    order = torch.cat([_shuffled(count, _PAIRS, generator) for _ in range(questions)], 1)
    place = torch.arange(length) - 2 * _PAIRS - gap[:, None]  # index in the questions
    which = order.gather(1, place.clamp(min=0).div(2, rounding_mode="floor"))
    tokens = _noise(count, length, generator)
    tokens[:, : 2 * _PAIRS] = torch.stack([keys, values], -1).flatten(1)
    answers = (place >= 0) & (place % 2 == 1)
    tokens = torch.where(place >= 0, torch.where(answers, values.gather(1, which), keys.gather(1, which)), tokens)
    return tokens, answers


def _needles(count: int, length: int, generator: torch.Generator, varied: bool) -> Documents:
    """Needles of three tokens (mark, key, value) in noise, then questions: every key once, or repeatedly if varied."""
    keys, values = _pairs(count, _NEEDLES, generator)
    most = length // 3 - _NEEDLES
    questions = torch.full((count,), _NEEDLES)
    if varied:
        questions += _distances(most - _NEEDLES, count, generator, varied)
    room = length - 3 * (questions + _NEEDLES)
    free = (torch.rand(count, _NEEDLES, generator=generator) * (room[:, None] + 1)).long().sort(-1).values
    places = free + 3 * torch.arange(_NEEDLES)
    tokens = _noise(count, length, generator)
    for step, symbols in enumerate((torch.full_like(keys, _MARK), keys, values)):
        tokens.scatter_(1, places + step, symbols)
    order = torch.cat([_shuffled(count, _NEEDLES, generator) for _ in range(-(-most // _NEEDLES))], 1)
    place = torch.arange(length) - (length - 3 * questions)[:, None]  # index in the questions
    which = order.gather(1, place.clamp(min=0).div(3, rounding_mode="floor"))
    for step, symbols in enumerate((torch.full_like(which, _ASK), keys.gather(1, which), values.gather(1, which))):
        tokens = torch.where((place >= 0) & (place % 3 == step), symbols, tokens)
    return tokens, (place >= 0) & (place % 3 == 2)


def _copy(count: int, length: int, generator: torch.Generator, varied: bool) -> Documents:
    """A separator and the string, repeated until the document is full; the first copy is cut at its start."""
    longest = (length - 2) // 2
    size = _SHORTEST_STRING + _distances(longest - _SHORTEST_STRING, count, generator, varied)
    string = torch.randint(_SEPARATOR, (count, longest), generator=generator)
    string = torch.cat([torch.full((count, 1), _SEPARATOR), string], 1)
    period = size[:, None] + 1
    back = torch.arange(length - 1, -1, -1)  # distance to the last token, which ends a string
    tokens = string.gather(1, (period - 1 - back % period))
    whole = length % period + period  # the position of the second separator, after the first whole string
    return tokens, (torch.arange(length) > whole) & (tokens != _SEPARATOR)


def _flip_flop(count: int, length: int, generator: torch.Generator, varied: bool) -> Documents:
    """The first pair writes and the last one reads; an odd length adds one token at the start."""
    pairs = length // 2
    share = min(_MOST_WRITTEN, _WRITES / pairs)
    drawn = torch.rand(count, pairs, generator=generator)
    instruction = torch.where(drawn < share, _WRITE, torch.where(drawn < 2 * share, _READ, _IGNORE))
    instruction[:, 0], instruction[:, -1] = _WRITE, _READ
    bits = torch.randint(2, (count, pairs), generator=generator)
    written = torch.where(instruction == _WRITE, torch.arange(pairs), 0).cummax(1).values
    bits = torch.where(instruction == _READ, bits.gather(1, written), bits)
    tokens = torch.stack([instruction, bits], -1).flatten(1)
    answers = torch.stack([torch.zeros_like(instruction, dtype=torch.bool), instruction == _READ], -1).flatten(1)
    front = (length % 2, 0)
    return nn.functional.pad(tokens, front, value=_IGNORE), nn.functional.pad(answers, front)


# By task: the function that makes its documents, and the fewest tokens of one.
_TASKS: Mapping[SymbolTask, tuple[Callable[[int, int, torch.Generator, bool], Documents], int]] = {
    "mqar": (_mqar, 4 * _PAIRS),
    "needles": (_needles, 6 * _NEEDLES),
    "copy": (_copy, 2 * _SHORTEST_STRING + 2),
    "flip-flop": (_flip_flop, 4),
}


def _pairs(count: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct keys and random values, [count, pairs] each."""
    keys = _KEYS + _shuffled(count, _KINDS, generator)[:, :pairs]
    return keys, _VALUES + torch.randint(_KINDS, (count, pairs), generator=generator)


def _shuffled(count: int, things: int, generator: torch.Generator) -> Tensor:
    """[count, things]: 0 … things − 1, each row in its own random order."""
    return torch.rand(count, things, generator=generator).argsort(1)


def _distances(most: int, count: int, generator: torch.Generator, varied: bool) -> Tensor:
    """[count] random integers from 0 to `most`, inclusive; all are `most` unless varied."""
    return torch.randint(most + 1, (count,), generator=generator) if varied else torch.full((count,), most)


def _noise(count: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(_MARK, (count, length), generator=generator)
