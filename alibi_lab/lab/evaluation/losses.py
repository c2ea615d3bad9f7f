"""What a model predicts: the loss of each token of a text, and its answers to the tasks of `data/tasks.py`.

Windows over a text, or documents of a task, are read in batches that are halved if they do not fit in memory. All measures of
`evaluate.py` are reductions of these losses. The tasks ask whether a model uses distant context, by length and by the distance of
the answer; perplexity cannot tell, because a few neighbors predict most tokens well enough.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from alibi_attn.nn.allocator import MOST_MIB, kept_memory
from alibi_lab.lab.config import EvalConfig, SymbolTask
from alibi_lab.lab.data import tasks
from alibi_lab.lab.data.tasks import Encode, TaskError, shortest_passkey
from alibi_lab.lab.model.language_model import LanguageModel

Say: TypeAlias = Callable[[str], None]
Window: TypeAlias = tuple[int, int, int]  # inputs tokens[begin:stop], of which the last `scored` predictions count
# Rows of tokens, and which ones -> results of each row.
Read: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Column: TypeAlias = list[float | None]
Rows: TypeAlias = Iterable[Sequence[float | None]]
Places: TypeAlias = Callable[[int], Sequence[float]]  # of the evidence, by length
Score: TypeAlias = Callable[[LanguageModel, int], Rows]

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
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


def passkey(model: LanguageModel, encode: Encode, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of trials whose whole number greedy decoding would write, and the loss of the number's tokens.

    One row per length and depth; None if the method has no positions of this length, or the sentences do not fit.

    Raises:
        TaskError: the tokenizer writes two digits alike.
        EvaluationError: one trial does not fit in memory.
    """

    def score(stretched: LanguageModel, length: int) -> Rows:
        for depth in DEPTHS:
            rows, counts = tasks.passkey_rows(encode, length, depth=depth, trials=config.trials)
            scored = int(counts.max())
            nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
            digits = torch.arange(scored) >= scored - counts[:, None]
            yield float((hits | ~digits).all(-1).double().mean()), float(nats[digits].double().mean()), config.trials

    names = ("depth", "accuracy", "nats", "trials")
    return table(model, config, names, lambda length: DEPTHS, score, least=shortest_passkey(encode))


def recall(model: LanguageModel, alphabet: Tensor, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of the second segment's tokens, except the first, that are the most likely ones in their place, and their loss.

    One row per length and distance between the segments; None if the method has no positions of this length.

    Raises:
        TaskError: fewer than 32 tokens in the alphabet.
        EvaluationError: one trial does not fit in memory.
    """

    def score(stretched: LanguageModel, length: int) -> Rows:
        for distance in tasks.recall_distances(length):
            rows = tasks.recall_rows(
                alphabet, length, distance=distance, trials=config.trials, longest=config.lengths[-1]
            )
            nats, hits = answers(stretched, rows, scored=tasks.ASKED, batch_tokens=config.batch_tokens, say=say)
            yield float(hits.double().mean()), float(nats.double().mean()), hits.numel()

    names = ("distance", "accuracy", "nats", "tokens")
    return table(model, config, names, tasks.recall_distances, score)


def symbols(
    model: LanguageModel, task: SymbolTask, alphabet: Tensor, config: EvalConfig, *, say: Say | None = None
) -> dict[str, dict[str, Column]]:
    """Two curves, named after the task and the task with "_by_part": what greedy decoding would write, and the answers' loss.

    The first has one row per length, for documents with one more token and the largest distances of the task: the share of
    correct answers, and of documents whose answers are all correct; None if the method or the task does not allow the length.
    The second has the share of correct answers in at most 32 consecutive parts of the documents, which are the same for all
    models.

    Args:
        alphabet: the tokens of the text; no other text can replace a corpus that the task made.

    Raises:
        TaskError: the text has other tokens than the task's corpus.
        EvaluationError: one document does not fit in memory.
    """
    if len(alphabet) and int(alphabet[-1]) >= tasks.SYMBOLS:
        advice = f"test it on data.corpus=task:{task}, or leave it out of eval.tasks"
        raise TaskError(f"{task} has its own {tasks.SYMBOLS} tokens; {advice}")
    by_part: list[tuple[float | None, ...]] = []

    def score(stretched: LanguageModel, length: int) -> Rows:
        generator = torch.Generator().manual_seed(length)
        rows, is_answer = tasks.symbol_documents(task, config.trials, length + 1, generator, varied=False)
        scored = int(is_answer.any(0).flip(0).nonzero().max()) + 1
        nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
        is_answer = is_answer[:, -scored:]
        correct, count = (hits & is_answer).sum(-1).double(), is_answer.sum(-1)
        parts = min(MOST_PARTS, config.trials)
        for part, (some, out_of) in enumerate(zip(correct.tensor_split(parts), count.tensor_split(parts), strict=True)):
            by_part.append((length, part, int(out_of.sum()), round(float(some.sum() / out_of.sum()), 6)))
        whole = float((correct == count).double().mean())
        yield float(correct.sum() / count.sum()), whole, float(nats[is_answer].double().mean()), int(count.sum())

    names = ("accuracy", "whole", "nats", "answers")
    by_length = table(model, config, names, None, score, least=tasks.shortest(task) - 1)
    return {task: by_length, f"{task}_by_part": columns(("length", "part", "answers", "accuracy"), by_part)}


def has_positions(model: LanguageModel, length: int) -> bool:
    """Whether the model's position method supports texts of `length` tokens."""
    limit = model.position.max_positions
    return limit is None or length <= limit


def table(
    model: LanguageModel, config: EvalConfig, names: Sequence[str], places: Places | None, score: Score, least: int = 0
) -> dict[str, Column]:
    """One row per length and place in it, (length, place, *score), or per length if `places` is None.

    Args:
        names: of the columns after "length".
        score: the other columns for every place, by the model for texts of a length; they are None where the method has no
            positions of this length, or it is below `least`.
    """
    rows: list[tuple[float | None, ...]] = []
    for length in config.lengths:
        keys = [(length, place) for place in places(length)] if places else [(length,)]
        found: Rows = [[None] * (len(names) + 1 - len(key)) for key in keys]
        if least <= length and has_positions(model, length):
            found = score(model.stretched(config.stretch, length), length)
        rows += [(*key, *values) for key, values in zip(keys, found, strict=True)]
    return columns(("length", *names), rows)


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
