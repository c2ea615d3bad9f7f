"""Does a model use distant context? The tasks of `data/tasks.py`, by length and by the distance of the answer.

Perplexity cannot tell, because a few neighbors predict most tokens well enough. Next: `experiment.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from alibi_lab.lab.config import EvalConfig, SymbolTask
from alibi_lab.lab.data.tasks import (
    ASKED,
    SYMBOLS,
    Encode,
    TaskError,
    passkey_rows,
    recall_distances,
    recall_rows,
    shortest,
    shortest_passkey,
    symbol_documents,
)
from alibi_lab.lab.evaluation.losses import MOST_PARTS, Column, Say, answers, columns
from alibi_lab.lab.model.language_model import LanguageModel

Rows: TypeAlias = Iterable[Sequence[float | None]]
Places: TypeAlias = Callable[[int], Sequence[float]]  # of the evidence, by length
Score: TypeAlias = Callable[[LanguageModel, int], Rows]

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def passkey(model: LanguageModel, encode: Encode, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of trials whose whole number greedy decoding would write, and the loss of the number's tokens.

    One row per length and depth; None if the method has no positions of this length, or the sentences do not fit.

    Raises:
        TaskError: the tokenizer writes two digits alike.
        EvaluationError: one trial does not fit in memory.
    """

    def score(stretched: LanguageModel, length: int) -> Rows:
        for depth in DEPTHS:
            rows, counts = passkey_rows(encode, length, depth=depth, trials=config.trials)
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
        for distance in recall_distances(length):
            rows = recall_rows(alphabet, length, distance=distance, trials=config.trials, longest=config.lengths[-1])
            nats, hits = answers(stretched, rows, scored=ASKED, batch_tokens=config.batch_tokens, say=say)
            yield float(hits.double().mean()), float(nats.double().mean()), hits.numel()

    names = ("distance", "accuracy", "nats", "tokens")
    return table(model, config, names, recall_distances, score)


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
        advice = f"test it on data.corpus=task:{task}, or leave it out of eval.tasks"
        raise TaskError(f"{task} has its own {SYMBOLS} tokens; {advice}")
    by_part: list[tuple[float | None, ...]] = []

    def score(stretched: LanguageModel, length: int) -> Rows:
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
        yield float(correct.sum() / count.sum()), whole, float(nats[is_answer].double().mean()), int(count.sum())

    names = ("accuracy", "whole", "nats", "answers")
    by_length = table(model, config, names, None, score, least=shortest(task) - 1)
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
