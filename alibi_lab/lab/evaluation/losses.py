"""The loss of a model on each token: batches of windows over a text, halved if they do not fit in memory.

All measures of `evaluate.py` and all tasks of `data/tasks.py` are reductions of what these functions return.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_attn.nn.allocator import MOST_MIB, kept_memory
from alibi_lab.lab.model.language_model import LanguageModel

Say: TypeAlias = Callable[[str], None]
Column: TypeAlias = list[float | None]

MOST_PARTS = 32  # parts of a test whose means are recorded: enough to estimate a variance
_Result = TypeVar("_Result")
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


@dataclasses.dataclass(frozen=True)
class Window:
    """Inputs tokens[begin:stop], of which the last `scored` predictions count."""

    begin: int
    stop: int
    scored: int


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
    for window in windows:
        shapes.setdefault((window.stop - window.begin, window.scored), []).append(window.begin)
    targets, positions, losses = [], [], []
    for (length, scored), begins in shapes.items():
        first, places = torch.tensor(begins)[:, None], torch.arange(length + 1)

        def nats(part: slice, first: Tensor = first, places: Tensor = places, scored: int = scored) -> Tensor:
            with testing(model):
                rows = tokens[first[part] + places].to(model.device).long()
                return model(rows[:, :-1], targets=rows[:, -scored:], window=attention_window).cpu()

        batches = _in_batches(len(begins), nats, length=length, batch_tokens=batch_tokens, say=say)
        losses.append(torch.cat(list(batches)).flatten())
        targets.append((first + places[-scored:]).flatten())
        positions.append(places[-scored:].repeat(len(begins)))
    target = torch.cat(targets)
    order = target.argsort()
    return TokenLosses(target=target[order], position=torch.cat(positions)[order], loss_nats=torch.cat(losses)[order])


def answers(
    model: LanguageModel, rows: Tensor, *, scored: int, batch_tokens: int, say: Say | None = None
) -> tuple[Tensor, Tensor]:
    """(loss in nats, whether the token was the most likely one) of the last tokens of each row, both [N, scored].

    The rows are [N, T + 1], and each token is predicted from all tokens before it.

    Raises:
        EvaluationError: one row does not fit in memory.
    """

    def nats_and_hits(part: slice) -> tuple[Tensor, Tensor]:
        with testing(model):
            inputs = rows[part].to(model.device).long()
            logits, targets = model(inputs[:, :-1])[:, -scored:].float(), inputs[:, -scored:]
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
            return nats.cpu(), (logits.argmax(-1) == targets).cpu()

    batches = _in_batches(len(rows), nats_and_hits, length=rows.shape[1] - 1, batch_tokens=batch_tokens, say=say)
    nats, hits = zip(*batches, strict=True)
    return torch.cat(nats), torch.cat(hits)


def _in_batches(
    count: int, run: Callable[[slice], _Result], *, length: int, batch_tokens: int, say: Say | None
) -> Iterator[_Result]:
    """`run` on slices of 0 … count − 1 of `batch_tokens`; after a slice that does not fit in memory, on halves of it."""
    size, start = max(1, batch_tokens // length), 0
    while start < count:
        here = min(size, count - start)
        try:
            result = run(slice(start, start + here))
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeErrors, on CPUs too
            words = str(error).lower()
            if not isinstance(error, MemoryError) and not any(part in words for part in _OUT_OF_MEMORY):
                raise
        else:
            yield result
            start += here
            continue
        # Outside of the except clause, because the error holds the tensors of the failed batch.
        if here == 1:
            advice = "pass shorter eval.lengths, a smaller model, or a machine with more memory"
            raise EvaluationError(f"one window of {length} tokens does not fit in memory; {advice}")
        size = here // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if say is not None:
            say(f"{here} windows of {length} tokens do not fit in memory; going on with {size} at a time")


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
