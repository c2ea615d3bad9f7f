"""Does a model use what stands far back? The tasks of `tasks.py`, by length and by how far back the answer is.

Perplexity cannot say: most tokens are predicted well enough from a few neighbors. Read next: `experiment.py`.
"""

import torch
from torch import Tensor

from alibi_attn.lab.config import EvalConfig, SymbolTask
from alibi_attn.lab.losses import Column, Say, answers
from alibi_attn.lab.model import LanguageModel
from alibi_attn.lab.symbol_tasks import SYMBOLS, TaskError, shortest, symbol_documents
from alibi_attn.lab.tasks import SEGMENT, Encode, passkey_rows, recall_distances, recall_rows, shortest_passkey

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 16  # of every length and depth, or distance


def passkey(
    model: LanguageModel, encode: Encode, config: EvalConfig, *, trials: int = TRIALS, say: Say | None = None
) -> dict[str, Column]:
    """The share of the trials whose whole number is what greedy decoding would write, and the loss of the number's tokens.

    One row per length and depth; None where the method has no positions or the sentences no room.

    Raises:
        TaskError: the tokenizer writes two digits alike.
        EvaluationError: one trial does not fit in memory.
    """
    curve: dict[str, Column] = {name: [] for name in ("length", "depth", "accuracy", "nats", "trials")}
    shortest = shortest_passkey(encode)
    for length in config.lengths:
        stretched = model.stretched(config.stretch, length)
        for depth in DEPTHS:
            values: list[float | None] = [None, None, None]
            if shortest <= length and has_positions(model, length):
                rows, counts = passkey_rows(encode, length, depth=depth, trials=trials)
                scored = int(counts.max())
                nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
                asked = torch.arange(scored) >= scored - counts[:, None]
                right = (hits | ~asked).all(-1)
                values = [float(right.double().mean()), float(nats[asked].double().mean()), trials]
            for name, value in zip(curve, (length, depth, *values), strict=True):
                curve[name].append(value)
    return curve


def recall(
    model: LanguageModel, alphabet: Tensor, config: EvalConfig, *, trials: int = TRIALS, say: Say | None = None
) -> dict[str, Column]:
    """The share of the second segment's tokens, without the first, that are the likeliest where they stand, and their loss.

    One row per length and distance between the segments; None where the method has no positions.

    Raises:
        TaskError: fewer than 16 tokens in the alphabet.
        EvaluationError: one trial does not fit in memory.
    """
    curve: dict[str, Column] = {name: [] for name in ("length", "distance", "accuracy", "nats", "tokens")}
    for length in config.lengths:
        stretched = model.stretched(config.stretch, length)
        for distance in recall_distances(length):
            values: list[float | None] = [None, None, None]
            if has_positions(model, length):
                rows = recall_rows(alphabet, length, distance=distance, trials=trials, longest=config.lengths[-1])
                nats, hits = answers(stretched, rows, scored=SEGMENT - 1, batch_tokens=config.batch_tokens, say=say)
                values = [float(hits.double().mean()), float(nats.double().mean()), hits.numel()]
            for name, value in zip(curve, (length, distance, *values), strict=True):
                curve[name].append(value)
    return curve


def symbols(
    model: LanguageModel, task: SymbolTask, alphabet: Tensor, config: EvalConfig, *, trials: int = TRIALS,
    say: Say | None = None,
) -> dict[str, Column]:  # fmt: skip
    """The share of the answers, and that of the documents with all answers, that greedy decoding would write; the answers' loss.

    One row per length: documents of one more token, at the task's largest distances. None where the method has no positions or
    the task no room.

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
    curve: dict[str, Column] = {name: [] for name in ("length", "accuracy", "whole", "nats", "answers")}
    for length in config.lengths:
        values: list[float | None] = [None] * 4
        if length + 1 >= shortest(task) and has_positions(model, length):
            generator = torch.Generator().manual_seed(length)
            rows, asked = symbol_documents(task, trials, length + 1, generator, varied=False)
            scored = int(asked.any(0).flip(0).nonzero().max()) + 1
            stretched, asked = model.stretched(config.stretch, length), asked[:, -scored:]
            nats, hits = answers(stretched, rows, scored=scored, batch_tokens=config.batch_tokens, say=say)
            whole = (hits | ~asked).all(-1)
            values = [
                float(hits[asked].double().mean()), float(whole.double().mean()), float(nats[asked].double().mean()),
                int(asked.sum()),
            ]  # fmt: skip
        for name, value in zip(curve, (length, *values), strict=True):
            curve[name].append(value)
    return curve


def has_positions(model: LanguageModel, length: int) -> bool:
    """Whether the model's position method can say where `length` tokens are."""
    limit = model.position.max_positions
    return limit is None or length <= limit
