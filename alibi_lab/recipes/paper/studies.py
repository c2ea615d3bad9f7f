"""The paper's studies: the trainings that its items share, each a function, and the lengths, costs and seeds of the items.

Sizes of models and trainings at each scale are in `studies.toml`. Read next: `items.py`.
"""

import tomllib
from pathlib import Path
from typing import Any

from alibi_lab.lab.config import Method, RunConfig, Scale
from alibi_lab.lab.config_io import from_json, to_json
from alibi_lab.lab.scales import MEDIUM, changed, trained_at
from alibi_lab.recipes.paper.cells import scaled, tested

LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072)  # L, table 5
LONGEST = 3072
FEW = (512, 1024, LONGEST)  # L, tables 2 to 4, figure 9 and table 8
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
WEB_LENGTHS = (512, 1024, 2048)
# figure 6 ends at 10,000; the lengths in between are our choice
EXTRAPOLATED = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10_000)
# L_valid of the curves of figure 5
FIGURE_5 = {("alibi", 512): 1024, ("sinusoidal", 1024): 1024, ("alibi", 1024): 2048, ("sinusoidal", 2048): 2048}
WARM_STEPS = 2  # of speed, not timed
_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COSTS: dict[str, str] = _READ["costs"]
SEEDS: dict[str, dict[str, int]] = _READ["seeds"]


def changed_by(study: str, scale: Scale, run: RunConfig) -> RunConfig:
    """The run with the fields that a study sets at a scale; they are checked like those of a record.

    >>> changed_by("books", "small", RunConfig()).data.tokenizer
    'bpe:1024'
    """
    config: dict[str, Any] = dict(to_json(run))
    return from_json({section: {**config[section], **_READ[study][scale].get(section, {})} for section in config})


# The run of each study at each scale; items set its method, lengths and tests.
_RUNS: dict[str, dict[Scale, RunConfig]] = {
    study: {scale: changed_by(study, scale, MEDIUM if scale == "medium" else RunConfig()) for scale in _READ[study]}
    for study in ("wikitext", "web")
}


def wikitext(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
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

    `staged` trains on short examples first.
    """
    run = _RUNS["wikitext"][scale]
    train: dict[str, Any] = {"length": scaled(paper_length, scale)}
    if scale == "paper" and paper_length == LONGEST:
        train["accumulate"] = 3  # --max-tokens 3072 --update-freq 3
    if staged:
        first = max(1, round(_FIRST_SHARE * run.train.steps))
        train |= {"first_length": scaled(_FIRST_LENGTH, scale), "first_steps": first}
    return changed(run, model={"method": method}, train=train)


def trained_lengths(scale: Scale) -> tuple[int, ...]:
    """Each L of table 5; at medium scale, where one training costs half an hour, only those of tables 2 to 4; at gpu 512."""
    return {"medium": FEW, "gpu": FEW[:1]}.get(scale, LENGTHS)


def extrapolation_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each published L_valid of tables 2–4; a selection below paper scale."""
    return tuple(paper_length + step for step in _STEPS[scale] if step <= _LAST_STEP[paper_length])


def books(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The models of appendix A.3 (Toronto BookCorpus): another domain, the same slopes.

    paper: the WikiText-103 model with one tied matrix of 29,000 byte pairs in place of the adaptive embedding and softmax.
    The corpus is no longer distributed: pass the books as files (--text). small, medium: as for WikiText-103, with half as many
    byte pairs, because the paper's vocabulary is smaller for books too; --text sets the books.
    """
    return changed_by("books", scale, wikitext(method, paper_length, scale, staged=staged))


def web(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """The 1.3-billion-parameter models of section 4.2 (CC100 + RoBERTa's corpus, 461 GB), trained for one epoch.

    Published: 25 layers, width 2048, 16 heads, ffn 8192, 50,000 updates, 128 V100. Derived: 2 million tokens per update, from
    461 GB in 50,000 updates. Not published, chosen here: AdamW with a learning rate of 2e-4, and 50,000 byte pairs. The corpus is
    not available as one dataset on the hub: OpenWebText, a part of it, replaces it; --text sets another.
    small and medium: 16 heads as published, a larger model than in the other studies, half as many tokens, more byte pairs.

    Those of figure 5 are validated during training.
    """
    run = changed(_RUNS["web"][scale], model={"method": method}, train={"length": scaled(paper_length, scale)})
    if (method, paper_length) in FIGURE_5:
        every, length = max(1, run.train.steps // 20), scaled(FIGURE_5[method, paper_length], scale)
        validation = {"validate_every": every, "validate_length": length, "validate_tokens": run.eval.tokens}
        run = changed(run, train=validation)
    return tested(run, [length for length in WEB_LENGTHS if length >= paper_length], scale)


def web_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each L_valid of figure 6 from L on; at smoke scale at most three."""
    lengths = tuple(length for length in EXTRAPOLATED if length >= paper_length)
    return lengths if scale != "smoke" else tuple(length for length in lengths if length in (512, 1024, 2048))


def speed(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """20 timed steps of the WikiText-103 model with about 9,216 tokens each (small: 2,304; medium: 4,608).

    Of figures 2 and 7 and table 1: each method at each length, training steps and one evaluation. At 3,072 tokens, batches are
    split in three, as in the paper. `run_items.py` does the measuring.
    """
    whole = wikitext(method, paper_length, scale)
    accumulate = 3 if paper_length == LONGEST else 1
    unit = whole.train.length * accumulate
    batch_tokens = {"smoke": 288, "small": 2304, "medium": 4608, "paper": 9216}[scale] // unit * unit
    steps = WARM_STEPS + (1 if scale == "smoke" else 20)
    length = whole.train.length
    train = {"steps": steps, "accumulate": accumulate, "warmup_steps": 1, "checkpoint_every": steps}
    batch = {"batch_tokens": batch_tokens}
    return trained_at(whole, (length,), train | batch, stride=length, tokens=8 * batch_tokens, **batch)
