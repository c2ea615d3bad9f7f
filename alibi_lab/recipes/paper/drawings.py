"""The two figures that compare no models: the biases ALiBi adds (figure 3), and how a text is divided (figure 10)."""

from collections.abc import Sequence

from alibi_attn import alibi_slopes
from alibi_lab.lab.config import EvalConfig
from alibi_lab.recipes.paper.cells import Cell, Curves
from alibi_lab.recipes.paper.evidence import Evidence

WORDS = ("The", "big", "gray", "cat", "sat", "on", "the", "mat")  # figure 10
WINDOW = 4
AS_DRAWN = EvalConfig(lengths=(WINDOW,), stride=1, tokens=8192)  # figure 10 on a trained model


def slopes(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """Each head's slope, and the bias it adds to keys 0, 1, 2, 3 and 4 tokens back, for 8 and for 16 heads."""
    curves: Curves = {}
    for heads in (8, 16):
        values = alibi_slopes(heads).tolist()
        biases = {f"bias_{distance}": [0.0 - slope * distance for slope in values] for distance in range(5)}
        curves[f"ALiBi, {heads} heads"] = {"head": list(range(1, heads + 1)), "slope": values, **biases}
    return curves


def windows(cells: Sequence[Cell], evidence: Evidence) -> Curves:
    """For each of eight words: the pass that scores it, its context length, and a trained model's loss at that length."""
    curves: Curves = {}
    for cell in cells:
        stride = WINDOW if cell.way == "nonoverlapping" else 1
        passes = [max(0, -(-(token + 1 - WINDOW) // stride)) for token in range(len(WORDS))]
        contexts = [token - number * stride + 1 for token, number in enumerate(passes)]
        record = evidence.matching("evaluation", cell.config)[0]
        position = record.curves["by_position"]
        loss = dict(zip(position["position"], position["loss_nats"], strict=True))
        curves[cell.label] = {
            "token": list(range(1, len(WORDS) + 1)),
            "word": list(WORDS),
            "context": list(contexts),
            "pass": [number + 1 for number in passes],
            "loss_nats": [loss[context] for context in contexts],
            "whole_text_nats": [record.curves["by_length"][f"{cell.way}_nats"][0]] * len(WORDS),
        }
    return curves
