"""Does a model use distant context? The tasks of `data/tasks.py`, by length and by the distance of the answer.

Perplexity cannot tell, because a few neighbors predict most tokens well enough. Next: `experiment.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_lab.lab.config import EvalConfig, SymbolTask
from alibi_lab.lab.data.symbol_tasks import SYMBOLS, TaskError, shortest, symbol_documents
from alibi_lab.lab.data.tasks import SEGMENT, Encode, passkey_rows, recall_distances, recall_rows, shortest_passkey
from alibi_lab.lab.evaluation.losses import MOST_PARTS, Column, Say, answers, columns
from alibi_lab.lab.model.language_model import LanguageModel

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def passkey(model: LanguageModel, encode: Encode, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of trials whose whole number greedy decoding would write, and the loss of the number's tokens.

    One row per length and depth; None if the method has no positions of this length, or the sentences do not fit.

    Raises:
        TaskError: the tokenizer writes two digits alike.
        EvaluationError: one trial does not fit in memory.
    """
    least = shortest_passkey(encode)

    def score(stretched: LanguageModel, length: int, depth: float) -> tuple[float, ...]:
        rows, counts = passkey_rows(encode, length, depth=depth, trials=config.trials)
        scored = int(counts.max())
        nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
        is_answer = torch.arange(scored) >= scored - counts[:, None]
        return float((hits | ~is_answer).all(-1).double().mean()), float(nats[is_answer].double().mean()), config.trials

    names = ("length", "depth", "accuracy", "nats", "trials")
    return _table(model, config, names, lambda length: DEPTHS, score, least=least)


def recall(model: LanguageModel, alphabet: Tensor, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of the second segment's tokens, except the first, that are the most likely ones in their place, and their loss.

    One row per length and distance between the segments; None if the method has no positions of this length.

    Raises:
        TaskError: fewer than 32 tokens in the alphabet.
        EvaluationError: one trial does not fit in memory.
    """

    def score(stretched: LanguageModel, length: int, distance: float) -> tuple[float, ...]:
        rows = recall_rows(alphabet, length, distance=int(distance), trials=config.trials, longest=config.lengths[-1])
        nats, hits = answers(stretched, rows, scored=SEGMENT - 1, batch_tokens=config.batch_tokens, say=say)
        return float(hits.double().mean()), float(nats.double().mean()), hits.numel()

    names = ("length", "distance", "accuracy", "nats", "tokens")
    return _table(model, config, names, recall_distances, score)


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
    if len(alphabet) and int(alphabet[-1]) >= SYMBOLS:
        raise TaskError(
            f"{task} has its own {SYMBOLS} tokens; test it on data.corpus=task:{task}, or leave it out of eval.tasks"
        )
    by_part: list[tuple[float | None, ...]] = []

    def score(stretched: LanguageModel, length: int, _: float) -> tuple[float, ...]:
        generator = torch.Generator().manual_seed(length)
        rows, is_answer = symbol_documents(task, config.trials, length + 1, generator, varied=False)
        scored = int(is_answer.any(0).flip(0).nonzero().max()) + 1
        nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
        is_answer = is_answer[:, -scored:]
        correct, count = (hits & is_answer).sum(-1).double(), is_answer.sum(-1)
        parts = min(MOST_PARTS, config.trials)
        for part, (some, out_of) in enumerate(zip(correct.tensor_split(parts), count.tensor_split(parts), strict=True)):
            by_part.append((length, part, int(out_of.sum()), round(float(some.sum() / out_of.sum()), 6)))
        whole = float((correct == count).double().mean())
        return float(correct.sum() / count.sum()), whole, float(nats[is_answer].double().mean()), int(count.sum())

    names = ("length", "accuracy", "whole", "nats", "answers")
    table = _table(model, config, names, lambda length: [None], score, least=shortest(task) - 1)
    return {task: table, f"{task}_by_part": columns(("length", "part", "answers", "accuracy"), by_part)}


def has_positions(model: LanguageModel, length: int) -> bool:
    """Whether the model's position method supports texts of `length` tokens."""
    limit = model.position.max_positions
    return limit is None or length <= limit


def _table(
    model: LanguageModel,
    config: EvalConfig,
    names: Sequence[str],
    places: Callable[[int], Sequence[float] | list[None]],
    score: Callable[[LanguageModel, int, float], Sequence[float]],
    *,
    least: int = 0,
) -> dict[str, Column]:
    """One row per length and place, (length, place, *score); a place of None is not a column."""
    rows: list[tuple[float | None, ...]] = []
    for length in config.lengths:
        stretched = model.stretched(config.stretch, length)
        for place in places(length):
            key = (length,) if place is None else (length, place)
            if least <= length and has_positions(model, length):
                rows.append((*key, *score(stretched, length, place or 0.0)))
            else:
                rows.append((*key, *[None] * (len(names) - len(key))))
    return columns(names, rows)
