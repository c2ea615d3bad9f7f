"""Does a model use what stands far back? The tasks of `tasks.py`, by length and by how far back the answer is.

Perplexity cannot say: most tokens are predicted well enough from a few neighbors. Read next: `experiment.py`.
"""

import torch
from torch import Tensor

from alibi_attn.lab.config import EvalConfig
from alibi_attn.lab.losses import Column, Say, answers
from alibi_attn.lab.model import LanguageModel
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


def has_positions(model: LanguageModel, length: int) -> bool:
    """Whether the model's position method can say where `length` tokens are."""
    limit = model.position.max_positions
    return limit is None or length <= limit
