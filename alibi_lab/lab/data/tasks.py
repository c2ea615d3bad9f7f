"""Tasks that a model can solve only by using its context: find a number (passkey), repeat a segment (recall).

These tasks and the four of `symbol_tasks.py` depend only on their seeds, so every model, length and position method
gets the same examples.

* passkey (Mohtashami and Jaggi 2023, sec. 4.2, arXiv:2305.16300, shortened): filler sentences, with one sentence
  hidden among them: "The pass key is 7 1 4 3 2 ."; at the end the sentence starts again, and the model must predict
  the number. Depth 0 hides it at the start, depth 1 at the end. Spaces separate the digits, so that byte, BPE and
  word tokenizers can all encode them.
* recall: random tokens, in which a segment of 8 tokens occurs again at the end, `distance` tokens later. Half of the
  alphabet is noise; the other half is divided into 8 parts, and token p of a segment is from part p. So a model that
  has learned the parts can answer by attending to one token: the earlier token of part p + 1. Such tokens occur only
  in the segment.

Rows are [N, T + 1]: T inputs, followed by the last token to predict. Read next: `context_use.py`.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from alibi_lab.lab.config import TASK_CORPUS, Task
from alibi_lab.lab.data.sources import Part
from alibi_lab.lab.data.symbol_tasks import SYMBOLS, TaskError, symbol_documents

Encode: TypeAlias = Callable[[str], Sequence[int]]

SEGMENT = 8  # number of tokens that recall repeats; the first one is the cue, the others are scored
ASKED = SEGMENT - 1
DOCUMENT_TOKENS = 128  # the default for the corpus of a task
CORPUS_TOKENS: Mapping[Part, int] = {"train": 1 << 22, "valid": 1 << 17, "test": 1 << 17}
KEY_DIGITS = 5
NEEDLE = " The pass key is"
FILLER = " The grass is green . The sky is blue . The sun is yellow . Here we go . There and back again ."


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
    noise, parts = _recall_parts(alphabet)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(noise), (trials, (longest or length) + 1), generator=generator)
    rows = noise[places][:, -(length + 1) :]
    which = torch.randint(parts.shape[1], (trials, SEGMENT), generator=generator)
    segments = parts[torch.arange(SEGMENT), which]
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


def _recall_parts(alphabet: Tensor) -> tuple[Tensor, Tensor]:
    """The noise tokens (half of the alphabet), and the tokens of each part, [SEGMENT, the other half / SEGMENT]."""
    each = len(alphabet) // (2 * SEGMENT)
    if each < 2:
        found = f"the text has {len(alphabet)} different tokens but recall needs {4 * SEGMENT}"
        raise TaskError(f'{found}; leave "recall" out of eval.tasks')
    alphabet = alphabet.long()
    return alphabet[: -each * SEGMENT], alphabet[-each * SEGMENT :].unflatten(0, (SEGMENT, each))


def _recall_documents(count: int, document_tokens: int, generator: torch.Generator) -> Tensor:
    """Documents of noise in which one segment repeats at random gaps, up to a limit drawn for each document."""
    if document_tokens < 2 * SEGMENT:
        raise TaskError(f"documents of {document_tokens} tokens have no room to recall; pass {2 * SEGMENT} or more")
    noise, parts = _recall_parts(torch.arange(SYMBOLS))
    documents = noise[torch.randint(len(noise), (count, document_tokens + SEGMENT), generator=generator)]
    segments = parts[torch.arange(SEGMENT), torch.randint(parts.shape[1], (count, SEGMENT), generator=generator)]
    widest = torch.rand(count, generator=generator) * (document_tokens - 2 * SEGMENT)
    begin = torch.zeros(count)
    while bool((begin < document_tokens).any()):
        begin += torch.rand(count, generator=generator) * widest
        places = begin.clamp(max=document_tokens).long()[:, None] + torch.arange(SEGMENT)
        documents.scatter_(1, places, segments)
        begin += SEGMENT
    return documents[:, :document_tokens]
