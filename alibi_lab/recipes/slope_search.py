"""Slopes: ALiBi with nine sets of slopes, trained at 64 tokens and tested up to 1,024.

Paper: section 3, which mentions a search over about ten sets, and trained slopes, without numbers. Every training has the same
model, steps and order, with three seeds.
"""

import dataclasses

from alibi_lab.lab.config import EvalConfig, Method, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_lab.recipes.scales import LARGE, MEDIUM, TINY, trained_at, with_model

SETS = ("Flattest4", "Flattest16", "Flattest4096", "Flattest65536", "AboveOne", "Uniform", "Exponential")
COMPARED: tuple[Method, ...] = (
    "alibi",
    "alibi-learned",
    *(f"alibi_lab.lab.systems.slope_range:{name}" for name in SETS),
)
SEEDS = (0, 1, 2)
_RUNS: dict[Scale, RunConfig] = {
    "smoke": RunConfig(
        model=TINY.model,
        train=TrainConfig(length=16, steps=2, batch_tokens=64, warmup_steps=1, log_every=1, checkpoint_every=2),
        eval=EvalConfig(lengths=(16, 32), tokens=32, batch_tokens=2048),
    ),
    "small": RunConfig(
        model=ModelConfig(num_layers=2, num_heads=8, embed_dim=64, ffn_dim=168),
        train=TrainConfig(
            length=64, steps=300, batch_tokens=4096, learning_rate=5e-3, warmup_steps=30, checkpoint_every=200
        ),
        eval=EvalConfig(lengths=(64, 128, 256, 512, 1024), tokens=16_384),
    ),
    "medium": trained_at(MEDIUM, 128, EvalConfig(lengths=(128, 256, 512, 1024, 2048), tokens=65_536)),
    "paper": trained_at(
        LARGE, 512, EvalConfig(lengths=(512, 1024, 2048, 4096, 8192), tokens=262_144, batch_tokens=65_536)
    ),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Every set of slopes with every seed; `smoke` has one seed."""
    run = _RUNS[scale]
    return tuple(
        dataclasses.replace(with_model(run, method=method), train=dataclasses.replace(run.train, seed=seed))
        for seed in (SEEDS[:1] if scale == "smoke" else SEEDS)
        for method in COMPARED
    )


RECIPE = Recipe(
    name="slopes",
    question="Which set of slopes predicts best beyond the trained length, and does training them help?",
    paper="section 3",
    cost="small: 27 trainings, about half a minute of one core each, tests included; smoke: seconds; medium and paper: not run",
    expected=(
        "the paper: slopes within (0, 1), denser toward 0, are best, and trained ones extrapolate no better; so small a model of "
        "bytes prefers steeper slopes at every length, trained ones are between, and flatter ones rise beyond the trained length"
    ),
    runs=runs,
)
