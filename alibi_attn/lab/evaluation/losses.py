"""What a model loses on each token: batches of windows over a text, smaller ones where the memory does not hold them.

Every measure of `evaluate.py` and every task of `data/tasks.py` is a reduction of what these functions return.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_attn.lab.model.language_model import LanguageModel

Say: TypeAlias = Callable[[str], None]
Column: TypeAlias = list[float | None]

MOST_PARTS = 32  # of a test, whose means a record keeps apart: many enough for a variance
_Result = TypeVar("_Result")
# What torch says on CPUs and on accelerators, and oneDNN where it cannot map the memory of a kernel.
_NO_ROOM = ("can't allocate memory", "not enough memory", "out of memory", "could not create a primitive")


class EvaluationError(ValueError):
    """A test that cannot be made: one window does not fit in memory, or a task does not fit the tokens."""


@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """One entry per scored token, all [N], in order of the text.

    Args:
        target: which token of the text was predicted.
        position: from how many inputs; equally its place in the window, starting at 1.
        loss_nats: −ln of the probability that the model gave it, fp32.
    """

    target: Tensor
    position: Tensor
    loss_nats: Tensor


@dataclasses.dataclass(frozen=True)
class Window:
    """Inputs tokens[begin:stop]; the last `scored` predictions count."""

    begin: int
    stop: int
    scored: int


def columns(names: Sequence[str], rows: Iterable[Sequence[float | None]]) -> dict[str, Column]:
    """A curve of a record: the rows as a list per name.

    >>> columns(("length", "nats"), [(128, 1.5), (256, None)])
    {'length': [128, 256], 'nats': [1.5, None]}
    """
    found = list(rows)
    return {name: [row[at] for row in found] for at, name in enumerate(names)}


def token_losses(
    model: LanguageModel,
    tokens: Tensor,
    windows: Sequence[Window],
    *,
    batch_tokens: int,
    attention_window: int | None = None,
    say: Say | None = None,
) -> TokenLosses:
    """What each scored token of the windows costs; windows of one shape share batches of up to `batch_tokens` inputs.

    Args:
        attention_window: how many tokens each one may see in every layer, itself included; None = all before it.
        say: is told where a batch did not fit in memory.

    Raises:
        EvaluationError: one window does not fit in memory.
    """
    shapes: dict[tuple[int, int], list[int]] = {}
    for window in windows:
        shapes.setdefault((window.stop - window.begin, window.scored), []).append(window.begin)
    targets, positions, losses = [], [], []
    for (length, scored), begins in shapes.items():
        first, places = torch.tensor(begins)[:, None], torch.arange(length + 1)

        def nats(part: slice, first: Tensor = first, places: Tensor = places, scored: int = scored) -> Tensor:
            return _nats(model, tokens[first[part] + places], scored, attention_window)

        found = _in_batches(len(begins), nats, length=length, batch_tokens=batch_tokens, say=say)
        losses.append(torch.cat(list(found)).flatten())
        targets.append((first + places[-scored:]).flatten())
        positions.append(places[-scored:].repeat(len(begins)))
    target = torch.cat(targets)
    order = target.argsort()
    return TokenLosses(target=target[order], position=torch.cat(positions)[order], loss_nats=torch.cat(losses)[order])


def answers(
    model: LanguageModel, rows: Tensor, *, scored: int, batch_tokens: int, say: Say | None = None
) -> tuple[Tensor, Tensor]:
    """Of the last tokens of each row [N, T + 1], each predicted from all before it: its loss in nats, and whether it was
    the likeliest token; both [N, scored].

    Raises:
        EvaluationError: one row does not fit in memory.
    """
    length = rows.shape[1] - 1

    def run(part: slice) -> tuple[Tensor, Tensor]:
        return _nats_and_hits(model, rows[part], scored)

    nats, hits = zip(*_in_batches(len(rows), run, length=length, batch_tokens=batch_tokens, say=say), strict=True)
    return torch.cat(nats), torch.cat(hits)


def _in_batches(
    count: int, run: Callable[[slice], _Result], *, length: int, batch_tokens: int, say: Say | None
) -> Iterator[_Result]:
    """`run` of 0 … count − 1 in parts of `batch_tokens`; from the part that does not fit in memory on, in halves of it."""
    size = max(1, batch_tokens // length)
    start = 0
    while start < count:
        here = min(size, count - start)
        try:
            result = run(slice(start, start + here))
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError, and so is a CPU's
            if not _is_out_of_memory(error):
                raise
        else:
            yield result
            start += here
            continue
        # Here and not above: while the error is held, so are the tensors of the batch that failed.
        if here == 1:
            raise EvaluationError(
                f"one window of {length} tokens does not fit in memory; pass shorter eval.lengths, a smaller model, or a "
                "machine with more memory"
            )
        size = here // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if say is not None:
            say(f"{here} windows of {length} tokens do not fit in memory; going on with {size} at a time")


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in words for part in _NO_ROOM)


def _nats(model: LanguageModel, rows: Tensor, scored: int, attention_window: int | None) -> Tensor:
    with _testing(model):
        rows = rows.to(model.device).long()
        nats: Tensor = model(rows[:, :-1], targets=rows[:, -scored:], window=attention_window)
        return nats.cpu()


def _nats_and_hits(model: LanguageModel, rows: Tensor, scored: int) -> tuple[Tensor, Tensor]:
    with _testing(model):
        rows = rows.to(model.device).long()
        logits, targets = model(rows[:, :-1])[:, -scored:].float(), rows[:, -scored:]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return nats.cpu(), (logits.argmax(-1) == targets).cpu()


@contextlib.contextmanager
def _testing(model: LanguageModel) -> Iterator[None]:
    """Without gradients and dropout; the model is left as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
