"""Does a model use what stands far back? The tasks of `data/tasks.py`, by length and by how far back the answer is.

Perplexity cannot say: most tokens are predicted well enough from a few neighbors. Read next: `experiment.py`.
"""

import torch
from torch import Tensor

from alibi_attn.lab.config import EvalConfig, SymbolTask
from alibi_attn.lab.data.symbol_tasks import SYMBOLS, TaskError, shortest, symbol_documents
from alibi_attn.lab.data.tasks import SEGMENT, Encode, passkey_rows, recall_distances, recall_rows, shortest_passkey
from alibi_attn.lab.evaluation.losses import MOST_PARTS, Column, Say, answers, columns
from alibi_attn.lab.model.language_model import LanguageModel

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def passkey(model: LanguageModel, encode: Encode, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of the trials whose whole number is what greedy decoding would write, and the loss of the number's tokens.

    One row per length and depth; None where the method has no positions or the sentences no room.

    Raises:
        TaskError: the tokenizer writes two digits alike.
        EvaluationError: one trial does not fit in memory.
    """
    table: list[tuple[float | None, ...]] = []
    shortest = shortest_passkey(encode)
    for length in config.lengths:
        stretched = model.stretched(config.stretch, length)
        for depth in DEPTHS:
            values: list[float | None] = [None, None, None]
            if shortest <= length and has_positions(model, length):
                rows, counts = passkey_rows(encode, length, depth=depth, trials=config.trials)
                scored = int(counts.max())
                nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
                asked = torch.arange(scored) >= scored - counts[:, None]
                right = (hits | ~asked).all(-1)
                values = [float(right.double().mean()), float(nats[asked].double().mean()), config.trials]
            table.append((length, depth, *values))
    return columns(("length", "depth", "accuracy", "nats", "trials"), table)


def recall(model: LanguageModel, alphabet: Tensor, config: EvalConfig, *, say: Say | None = None) -> dict[str, Column]:
    """The share of the second segment's tokens, without the first, that are the likeliest where they stand, and their loss.

    One row per length and distance between the segments; None where the method has no positions.

    Raises:
        TaskError: fewer than 16 tokens in the alphabet.
        EvaluationError: one trial does not fit in memory.
    """
    table: list[tuple[float | None, ...]] = []
    for length in config.lengths:
        stretched = model.stretched(config.stretch, length)
        for distance in recall_distances(length):
            values: list[float | None] = [None, None, None]
            if has_positions(model, length):
                rows = recall_rows(
                    alphabet, length, distance=distance, trials=config.trials, longest=config.lengths[-1]
                )
                nats, hits = answers(stretched, rows, scored=SEGMENT - 1, batch_tokens=config.batch_tokens, say=say)
                values = [float(hits.double().mean()), float(nats.double().mean()), hits.numel()]
            table.append((length, distance, *values))
    return columns(("length", "distance", "accuracy", "nats", "tokens"), table)


def symbols(
    model: LanguageModel, task: SymbolTask, alphabet: Tensor, config: EvalConfig, *, say: Say | None = None
) -> dict[str, dict[str, Column]]:
    """Two curves, named after the task and with "_by_part" behind it: what greedy decoding would write, and the answers' loss.

    The first has a row per length: documents of one more token, at the task's largest distances; the share of the answers that
    are right, and that of the documents with all answers right. None where the method has no positions or the task no room. The
    second has the share of the answers in consecutive parts of the documents, which all models meet: at most 32, a document or
    more each.

    Args:
        alphabet: the tokens of the text; the tasks' own corpora have theirs, which no other text stands for.

    Raises:
        TaskError: the text has other tokens than such a corpus.
        EvaluationError: one document does not fit in memory.
    """
    if len(alphabet) and int(alphabet[-1]) >= SYMBOLS:
        raise TaskError(
            f"{task} has {SYMBOLS} tokens of its own; test it on data.corpus=task:{task}, or leave it out of eval.tasks"
        )
    table: list[tuple[float | None, ...]] = []
    by_part: list[tuple[float | None, ...]] = []
    for length in config.lengths:
        values: list[float | None] = [None] * 4
        if length + 1 >= shortest(task) and has_positions(model, length):
            hits, asked, nats = _answered(model, task, length, config, say)
            right, count = (hits & asked).sum(-1).double(), asked.sum(-1)
            values = [
                float(right.sum() / count.sum()), float((right == count).double().mean()), float(nats[asked].double().mean()),
                int(count.sum()),
            ]  # fmt: skip
            parts = min(MOST_PARTS, config.trials)
            shared = zip(right.tensor_split(parts), count.tensor_split(parts), strict=True)
            for part, (found, answered) in enumerate(shared):
                share = round(float(found.sum() / answered.sum()), 6)
                by_part.append((length, part, int(answered.sum()), share))
        table.append((length, *values))
    return {
        task: columns(("length", "accuracy", "whole", "nats", "answers"), table),
        f"{task}_by_part": columns(("length", "part", "answers", "accuracy"), by_part),
    }


def _answered(
    model: LanguageModel, task: SymbolTask, length: int, config: EvalConfig, say: Say | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the last tokens of each document are right, which are asked for, and their losses; all [documents, tokens]."""
    generator = torch.Generator().manual_seed(length)
    rows, asked = symbol_documents(task, config.trials, length + 1, generator, varied=False)
    scored = int(asked.any(0).flip(0).nonzero().max()) + 1
    stretched = model.stretched(config.stretch, length)
    nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
    return hits, asked[:, -scored:], nats


def has_positions(model: LanguageModel, length: int) -> bool:
    """Whether the model's position method can say where `length` tokens are."""
    limit = model.position.max_positions
    return limit is None or length <= limit
