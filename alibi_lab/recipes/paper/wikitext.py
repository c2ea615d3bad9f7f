"""The models of sections 2.2 and 4.1 (WikiText-103), and the lengths at which the paper trains and tests them.

paper: Baevski & Auli's model with the authors' published training command, 8 GPUs with 9,216 tokens each.
small: an eighth of every length, byte pairs of the local text, a modern decoder of 1 million weights with the paper's
8 heads, AdamW; the same text in the same order for every method at every length.
medium: a quarter of every length, 3.7 million weights, 10 million tokens per training, matrix products in bf16.
gpu: half of the paper's layers, at its width, heads and lengths; byte pairs, one embedding, AdamW, bf16, compiled layers.
Planned for ten minutes on one H100, whose matrix products run at 790 TFLOP/s in bf16:
    per token   6 · (8 · 12 · 1024² + 8192 · 1024) + 12 · 8 · 1024 · 513/2 = 679.5 MFLOP
    per step    32,768 tokens, 22.3 TFLOP, 81 ms at a utilization of 35 %
    in all      7,400 steps, 242 million tokens, 596 s
"""

from typing import Any

from alibi_lab.lab.config import Method, RunConfig, Scale
from alibi_lab.recipes.paper import studies
from alibi_lab.recipes.paper.cells import scaled
from alibi_lab.recipes.scales import changed

TRAINED = (64, 128, 256, 512, 1024, 1536, 2048, 3072)  # L, table 5
LONGEST = 3072
_FEW = (512, 1024, LONGEST)  # L, tables 2 to 4
STRIDE = 512  # S of tables 7 and 10
# Scored with S = 1, one full window per token: few tokens below paper scale.
STRIDE_1_TOKENS: dict[Scale, int] = {"smoke": 48, "small": 768, "medium": 512}
# How far beyond L tables 2–4 go: all of their steps, and a selection for the smaller scales.
_SOME_STEPS = (0, 100, 500, 1000, 2000, 3000, 5000, 7000, 10_000, 13_000, 15_000)
_STEPS: dict[Scale, tuple[int, ...]] = {
    "smoke": (0, 100, 1000, 2000),
    "small": (0, 20, 100, 500, 2000, 5000, 10_000, 15_000),
    "medium": _SOME_STEPS,
    "gpu": _SOME_STEPS,
    "paper": (0, 1, *range(10, 101, 10), *range(200, 1001, 100), *range(2000, 15_001, 1000)),
}
_LAST_STEP = {512: 15_000, 1024: 15_000, 3072: 13_000}
# Staged training (Press et al. 2021, "Shortformer"; their best: 50 of 205 epochs at 128 tokens, from memory).
_FIRST_LENGTH, _FIRST_SHARE = 128, 50 / 205
_RUNS = studies.runs("wikitext")


def training(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The run of a method trained at a length of the paper; `staged` trains on short examples first."""
    run = _RUNS[scale]
    train: dict[str, Any] = {"length": scaled(paper_length, scale)}
    if scale == "paper" and paper_length == LONGEST:
        train["accumulate"] = 3  # --max-tokens 3072 --update-freq 3
    if staged:
        first = max(1, round(_FIRST_SHARE * run.train.steps))
        train |= {"first_length": scaled(_FIRST_LENGTH, scale), "first_steps": first}
    return changed(run, model={"method": method}, train=train)


def trained_lengths(scale: Scale) -> tuple[int, ...]:
    """Each L of table 5; at medium scale, where one training costs half an hour, only those of tables 2 to 4; at gpu 512."""
    return {"medium": _FEW, "gpu": _FEW[:1]}.get(scale, TRAINED)


def extrapolation_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each published L_valid of tables 2–4; a selection below paper scale."""
    return tuple(paper_length + step for step in _STEPS[scale] if step <= _LAST_STEP[paper_length])
