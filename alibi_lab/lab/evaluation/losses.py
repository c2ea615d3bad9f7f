"""The loss of a model on each token: batches of windows over a text, halved if they do not fit in memory.

All measures of `evaluate.py` and all tasks of `data/tasks.py` are reductions of what these functions return.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from alibi_attn.nn.allocator import MOST_MIB, kept_memory
from alibi_lab.lab.model.language_model import LanguageModel

Say: TypeAlias = Callable[[str], None]
Window: TypeAlias = tuple[int, int, int]  # inputs tokens[begin:stop], of which the last `scored` predictions count
Read: TypeAlias = Callable[
    [Tensor, Tensor], tuple[Tensor, ...]
]  # rows of tokens, and which ones -> results of each row
Column: TypeAlias = list[float | None]

MOST_PARTS = 32  # parts of a test whose means are recorded: enough to estimate a variance
_Cell = TypeVar("_Cell")
# The messages of torch on CPUs and accelerators, and of oneDNN if it cannot map memory for a kernel.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "could not create a primitive")


class EvaluationError(ValueError):
    """A test that cannot run: one window does not fit in memory, or a task does not fit the tokens."""


@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """One entry per scored token, all [N], in text order.

    Args:
        target: the index of the predicted token in the text.
        position: the number of inputs it was predicted from, which is its place in the window, from 1.
        loss_nats: −ln of the probability that the model assigned to it, fp32.
    """

    target: Tensor
    position: Tensor
    loss_nats: Tensor


def columns(names: Sequence[str], rows: Iterable[Sequence[_Cell]]) -> dict[str, list[_Cell]]:
    """A curve of a record: one list per name.

    >>> columns(("length", "nats"), [(128, 1.5), (256, None)])
    {'length': [128, 256], 'nats': [1.5, None]}
    """
    table = list(rows)
    return {name: [row[index] for row in table] for index, name in enumerate(names)}


def token_losses(
    model: LanguageModel,
    tokens: Tensor,
    windows: Sequence[Window],
    *,
    batch_tokens: int,
    attention_window: int | None = None,
    say: Say | None = None,
) -> TokenLosses:
    """The loss of every scored token. Windows of one shape share batches of up to `batch_tokens` inputs.

    Args:
        attention_window: the number of tokens that each token sees in every layer, itself included; None = all before it.
        say: receives a message if a batch does not fit in memory.

    Raises:
        EvaluationError: one window does not fit in memory.
    """
    shapes: dict[tuple[int, int], list[int]] = {}
    for begin, stop, scored in windows:
        shapes.setdefault((stop - begin, scored), []).append(begin)
    targets, positions, losses = list[Tensor](), list[Tensor](), list[Tensor]()
    for (length, scored), begins in shapes.items():

        def nats(rows: Tensor, which: Tensor, scored: int = scored) -> tuple[Tensor, ...]:
            return (model(rows[:, :-1], targets=rows[:, -scored:], window=attention_window),)

        first, places = torch.tensor(begins), torch.arange(length + 1 - scored, length + 1)
        losses += in_batches(model, tokens.unfold(0, length + 1, 1), nats, first, batch_tokens=batch_tokens, say=say)
        targets.append(first[:, None] + places)
        positions.append(places.expand(len(begins), -1))
    target, position, loss = (torch.cat([x.flatten() for x in found]) for found in (targets, positions, losses))
    order = target.argsort()
    return TokenLosses(target=target[order], position=position[order], loss_nats=loss[order])


def answers(
    model: LanguageModel, rows: Tensor, *, scored: int, batch_tokens: int, say: Say | None = None
) -> tuple[Tensor, Tensor]:
    """(loss in nats, whether the token was the most likely one) of the last tokens of each row, both [N, scored].

    The rows are [N, T + 1], and each token is predicted from all tokens before it.

    Raises:
        EvaluationError: one row does not fit in memory.
    """

    def nats_and_hits(some: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        logits, targets = model(some[:, :-1])[:, -scored:].float(), some[:, -scored:]
        nats = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return nats, logits.argmax(-1) == targets

    nats, hits = in_batches(model, rows, nats_and_hits, batch_tokens=batch_tokens, say=say)
    return nats, hits


def in_batches(
    model: LanguageModel,
    rows: Tensor,
    read: Read,
    which: Tensor | None = None,
    *,
    batch_tokens: int,
    say: Say | None = None,
) -> list[Tensor]:
    """What `read` returns for the rows, or some of them, `batch_tokens` at a time; after a batch that does not fit, half of it.

    Raises:
        EvaluationError: one row does not fit in memory.
    """
    length, found = rows.shape[1] - 1, []
    which = torch.arange(len(rows)) if which is None else which
    size, start = max(1, batch_tokens // length), 0
    while start < len(which):
        part = which[start : start + size]
        try:
            with testing(model):
                found.append([result.cpu() for result in read(rows[part].to(model.device).long(), part)])
            start += len(part)
            continue
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeErrors, on CPUs too
            words = str(error).lower()
            if not isinstance(error, MemoryError) and not any(phrase in words for phrase in _OUT_OF_MEMORY):
                raise
        # Outside of the except clause, because the error holds the tensors of the failed batch.
        if len(part) == 1:
            advice = "pass shorter eval.lengths, a smaller model, or a machine with more memory"
            raise EvaluationError(f"one window of {length} tokens does not fit in memory; {advice}")
        size = len(part) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if say is not None:
            say(f"{len(part)} windows of {length} tokens do not fit in memory; going on with {size} at a time")
    return [torch.cat(results) for results in zip(*found, strict=True)]


@contextlib.contextmanager
def testing(model: LanguageModel) -> Iterator[None]:
    """Disables gradients and dropout inside the block; the layers take each other's freed memory."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), kept_memory(MOST_MIB):
            yield
    finally:
        model.train(was_training)
