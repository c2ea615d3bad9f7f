"""Staged training: are short examples first and long ones later better than long ones throughout, with the same total tokens?

Paper: staged training (Press et al. 2021, "Shortformer") is the strongest baseline that tables 7 and 10 cite. There it uses
sinusoidal positions; ALiBi needs no new positions when the length changes, so this recipe trains both.
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALL, TINY, by_method, changed, trained_at

COMPARED: tuple[Method, ...] = ("sinusoidal", "alibi")
FIRST_SHARES = (0.5, 0.75)  # of the steps, at a quarter of the length
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(TINY, (32, 64)),
    "small": trained_at(SMALL, (256, 512, 1024), {"steps": 240, "warmup_steps": 24}),
    "medium": trained_at(MEDIUM, (256, 512, 1024, 2048)),
    "paper": trained_at(LARGE, (1024, 2048, 4096)),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Each method at full length throughout and in two stages, with the same number of tokens and the same batch size."""
    wholes = by_method(_RUNS[scale], COMPARED)
    return tuple(run for whole in wholes for run in (whole, *(_staged(whole, share) for share in FIRST_SHARES)))


def _staged(whole: RunConfig, share: float) -> RunConfig:
    first_length, first_steps = whole.train.length // 4, round(share * whole.train.steps)
    return changed(whole, train={"first_length": first_length, "first_steps": first_steps})


RECIPE = Recipe(
    name="curriculum",
    question="With the same number of tokens, does starting with short examples train a better model?",
    paper="none: the staged training that tables 7 and 10 cite, with sinusoidal positions and with ALiBi",
    cost="small: about five minutes on two cores; smoke: seconds; paper: hours on one GPU (not measured)",
    expected="staged training is faster; the runs show whether its final loss at the full length is lower",
    runs=runs,
)
