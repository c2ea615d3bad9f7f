"""Slopes: ALiBi with nine sets of slopes, trained at 64 tokens and tested up to 1,024.

Paper: section 3, which mentions a search over about ten sets, and trained slopes, without numbers. Every training has the same
model, steps and order, with three seeds.
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALLER, TWO_STEPS, changed, trained_at

SETS = ("Flattest4", "Flattest16", "Flattest4096", "Flattest65536", "AboveOne", "Uniform", "Exponential")
_MODULE = "alibi_lab.lab.systems.slope_range"
COMPARED: tuple[Method, ...] = ("alibi", "alibi-learned", *(f"{_MODULE}:{name}" for name in SETS))
SEEDS = (0, 1, 2)
_SMALL = changed(SMALLER, model={"num_heads": 8}, train={"steps": 300, "warmup_steps": 30, "checkpoint_every": 200})
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(TWO_STEPS, (16, 32), tokens=32),
    "small": trained_at(_SMALL, (64, 128, 256, 512, 1024)),
    "medium": trained_at(MEDIUM, (128, 256, 512, 1024, 2048), tokens=65_536),
    "paper": trained_at(LARGE, (512, 1024, 2048, 4096, 8192)),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Every set of slopes with every seed; `smoke` has one seed."""
    return tuple(
        changed(_RUNS[scale], model={"method": method}, train={"seed": seed})
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
