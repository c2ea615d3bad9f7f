"""Tasks that a model can solve only by using its context: find a number (passkey), repeat a segment (recall).

These tasks and the four symbol tasks depend only on their seeds, so every model, length and position method gets the same
examples.

* passkey (Mohtashami and Jaggi 2023, sec. 4.2, arXiv:2305.16300, shortened): filler sentences, with one sentence
  hidden among them: "The pass key is 7 1 4 3 2 ."; at the end the sentence starts again, and the model must predict
  the number. Depth 0 hides it at the start, depth 1 at the end. Spaces separate the digits, so that byte, BPE and
  word tokenizers can all encode them.
* recall: random tokens, in which a segment of 8 tokens occurs again at the end, `distance` tokens later. Half of the
  alphabet is noise; the other half is divided into 8 parts, and token p of a segment is from part p. So a model that
  has learned the parts can answer by attending to one token: the earlier token of part p + 1. Such tokens occur only
  in the segment.

Rows are [N, T + 1]: T inputs, followed by the last token to predict.

The symbol tasks are associative recall, needles, copying, and a one-bit memory. The preceding tokens determine every answer.

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
correct answers of a model that knows only the format. Read next: `evaluation/losses.py`.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from alibi_lab.lab.config import TASK_CORPUS, SymbolTask, Task
from alibi_lab.lab.data.sources import Part

Encode: TypeAlias = Callable[[str], Sequence[int]]
Documents: TypeAlias = tuple[Tensor, Tensor]

SEGMENT = 8  # number of tokens that recall repeats; the first one is the cue, the others are scored
ASKED = SEGMENT - 1
DOCUMENT_TOKENS = 128  # the default for the corpus of a task
CORPUS_TOKENS: Mapping[Part, int] = {"train": 1 << 22, "valid": 1 << 17, "test": 1 << 17}
KEY_DIGITS = 5
NEEDLE = " The pass key is"
FILLER = " The grass is green . The sky is blue . The sun is yellow . Here we go . There and back again ."
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


def passkey_rows(encode: Encode, length: int, *, depth: float, trials: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [trials, length + 1] that end with the number, and the number's length in tokens [trials].

    Raises:
        TaskError: both sentences do not fit in a row, or the tokenizer encodes two digits alike.
    """
    if length < (shortest := shortest_passkey(encode)):
        raise TaskError(f"a passkey has no room in {length} tokens; pass lengths of {shortest} or more")
    digits = _digits(encode)
    needle, stop, filler = (list(encode(text)) for text in (NEEDLE, " .", FILLER))
    rows, counts = [], []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(trials):
        drawn = torch.randint(10, (KEY_DIGITS,), generator=generator).tolist()
        start = int(torch.randint(len(filler), (), generator=generator))
        key = [token for digit in drawn for token in digits[digit]]
        hidden, question = [*needle, *key, *stop], [*needle, *key]
        room = length + 1 - len(hidden) - len(question)
        before = round(depth * room)
        around = [filler[(start + place) % len(filler)] for place in range(room)]
        rows.append([*around[:before], *hidden, *around[before:], *question])
        counts.append(len(key))
    return torch.tensor(rows), torch.tensor(counts)


def shortest_passkey(encode: Encode) -> int:
    """The fewest inputs that have room for the sentence, its repeated beginning, and any number except its last token.

    Raises:
        TaskError: the tokenizer encodes two digits alike.
    """
    longest_key = KEY_DIGITS * max(len(digit) for digit in _digits(encode))
    return 2 * (len(encode(NEEDLE)) + longest_key) + len(encode(" .")) - 1


def recall_rows(
    alphabet: Tensor, length: int, *, distance: int, trials: int, longest: int | None = None, seed: int = 0
) -> Tensor:
    """Rows [trials, length + 1] of tokens of the alphabet; the last 8 tokens also occur `distance` tokens earlier.

    Rows of two lengths with the same `longest` are equal when aligned at their ends, except for the position of the
    first copy of the segment.

    Raises:
        TaskError: the alphabet has fewer than 32 tokens, or the distance does not fit.
    """
    if not SEGMENT <= distance <= length + 1 - SEGMENT:
        farthest = length + 1 - SEGMENT
        raise TaskError(f"distance is {distance} but must be from {SEGMENT} to {farthest} in {length} tokens")
    generator = torch.Generator().manual_seed(seed)
    rows, segments = _noise_and_segments(alphabet, trials, (longest or length) + 1, generator)
    rows = rows[:, -(length + 1) :]
    rows[:, -SEGMENT:] = segments
    rows[:, length + 1 - SEGMENT - distance : length + 1 - distance] = segments
    return rows


def recall_distances(length: int) -> list[int]:
    """The distances 8, 16, 32, … and the largest one that fits.

    >>> recall_distances(64)
    [8, 16, 32, 57]
    """
    farthest = length + 1 - SEGMENT
    doubling = [SEGMENT << times for times in range(max(length, 1).bit_length()) if SEGMENT << times < farthest]
    return [*doubling, farthest] if farthest >= SEGMENT else []


def task_tokens(task: Task, tokens: int, seed: int, *, document_tokens: int = DOCUMENT_TOKENS) -> Tensor:
    """A training text [tokens] uint8: concatenated documents of one task, each of `document_tokens` tokens.

    If `train.length` equals `document_tokens`, every training example is one document. "passkey" consists of bytes,
    with the number at a random depth. The others have 64 different tokens; "recall" repeats its segment until the
    document is full.

    Raises:
        TaskError: the documents are too short for the task.
    """
    count = -(-tokens // document_tokens)
    generator = torch.Generator().manual_seed(seed)
    if task == "recall":
        documents = _recall_documents(count, document_tokens, generator)
    elif task == "passkey":
        depths = torch.rand(count, generator=generator).tolist()
        seeds = torch.randint(2**31, (count,), generator=generator).tolist()
        drawn = zip(depths, seeds, strict=True)
        rows = [passkey_rows(str.encode, document_tokens - 1, depth=d, trials=1, seed=own)[0] for d, own in drawn]
        documents = torch.cat(rows)
    else:
        documents, _ = symbol_documents(task, count, document_tokens, generator, varied=True)
    return documents.flatten()[:tokens].to(torch.uint8)


def parse_corpus(name: str) -> tuple[Task, int] | None:
    """The task and the tokens per document of a name such as "task:recall:64"; None if the name is not a task's corpus.

    >>> parse_corpus("task:recall:64")
    ('recall', 64)
    """
    found = TASK_CORPUS.fullmatch(name)
    return None if found is None else (typing.cast("Task", found[1]), int(found[2] or DOCUMENT_TOKENS))


def _digits(encode: Encode) -> list[list[int]]:
    digits = [list(encode(f" {digit}")) for digit in range(10)]
    for digit, spelled in enumerate(digits):
        if not spelled or spelled in digits[:digit]:
            found = f"the tokenizer writes the digits {digits.index(spelled)} and {digit} alike ({spelled})"
            advice = 'leave "passkey" out of eval.tasks, or use another data.tokenizer'
            raise TaskError(f"{found}, so that no number can be asked for; {advice}")
    return digits


def _noise_and_segments(alphabet: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of noise tokens (half of the alphabet), [count, length], and a segment of the others for each, [count, SEGMENT]."""
    each = len(alphabet) // (2 * SEGMENT)
    if each < 2:
        found = f"the text has {len(alphabet)} different tokens but recall needs {4 * SEGMENT}"
        raise TaskError(f'{found}; leave "recall" out of eval.tasks')
    noise, parts = alphabet.long().split([len(alphabet) - each * SEGMENT, each * SEGMENT])
    rows = noise[torch.randint(len(noise), (count, length), generator=generator)]
    which = torch.randint(each, (count, SEGMENT), generator=generator)
    return rows, parts.unflatten(0, (SEGMENT, each))[torch.arange(SEGMENT), which]


def _recall_documents(count: int, document_tokens: int, generator: torch.Generator) -> Tensor:
    """Documents of noise in which one segment repeats at random gaps, up to a limit drawn for each document."""
    if document_tokens < 2 * SEGMENT:
        raise TaskError(f"documents of {document_tokens} tokens have no room to recall; pass {2 * SEGMENT} or more")
    documents, segments = _noise_and_segments(torch.arange(SYMBOLS), count, document_tokens + SEGMENT, generator)
    widest = torch.rand(count, generator=generator) * (document_tokens - 2 * SEGMENT)
    begin = torch.zeros(count)
    while bool((begin < document_tokens).any()):
        begin += torch.rand(count, generator=generator) * widest
        places = begin.clamp(max=document_tokens).long()[:, None] + torch.arange(SEGMENT)
        documents.scatter_(1, places, segments)
        begin += SEGMENT
    return documents[:, :document_tokens]


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
    tokens = _noise(count, length, generator)
    tokens[:, : 2 * _PAIRS] = torch.stack([keys, values], -1).flatten(1)
    return _with_questions(tokens, 2 * _PAIRS + gap, order, (keys, values))


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
    return _with_questions(tokens, length - 3 * questions, order, (torch.full_like(keys, _ASK), keys, values))


def _with_questions(tokens: Tensor, begins: Tensor, order: Tensor, parts: Sequence[Tensor]) -> Documents:
    """The documents [count, length], ending in questions whose last token is the answer.

    Args:
        begins: [count], the first token of the questions.
        order: [count, questions], which one is asked.
        parts: the tokens of a question, each [count, different questions].
    """
    place, size = torch.arange(tokens.shape[1]) - begins[:, None], len(parts)
    which = order.gather(1, place.clamp(min=0).div(size, rounding_mode="floor"))
    for step, symbols in enumerate(parts):
        tokens = torch.where((place >= 0) & (place % size == step), symbols.gather(1, which), tokens)
    return tokens, (place >= 0) & (place % size == size - 1)


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
