"""All position methods of the lab, and five ways to stretch them after training: the same text, order and weights.

Paper: none; sections 2 and 3 compare four. A stretch changes positions at test time only: position interpolation, NTK and
YaRN for rotary, L / L' and NTK for ALiBi's slopes. One training is therefore tested several times. Each model is also tested
with its context limited to the trained length, the baseline that a stretch has to beat.
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale, Stretch
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALL, TINY, by_method, changed, trained_at
from alibi_lab.position_methods import LOOKS

STRETCHES: dict[Method, tuple[Stretch, ...]] = {"rotary": ("linear", "ntk", "yarn"), "alibi": ("linear", "ntk")}
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(TINY, (16, 64)),
    "small": trained_at(SMALL, (128, 256, 512, 1024), {"steps": 140, "warmup_steps": 14}),
    "medium": trained_at(MEDIUM, (128, 256, 512, 1024, 2048)),
    "paper": trained_at(LARGE, (512, 1024, 2048, 4096, 8192)),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Every method as trained, also with its context limited, then the stretched variants with the same weights."""
    plain = by_method(_RUNS[scale], tuple(LOOKS))
    stretched = [
        changed(run, eval={"stretch": stretch}) for run in plain for stretch in STRETCHES.get(run.model.method, ())
    ]
    return (*(changed(run, eval={"windowed": True}) for run in plain), *stretched)


RECIPE = Recipe(
    name="methods",
    question="Which position methods work beyond their trained length, and does stretching at test time help?",
    paper="none: section 2.2's question, asked of later methods",
    cost="small: about ten minutes on two cores; smoke: seconds; paper: hours on one GPU (not measured)",
    expected=(
        "perplexity does not rise with the ALiBi family and KERPLE; learned positions end at the trained length; stretched "
        "rotary rises less than plain rotary; no method improves much on its own windowed test"
    ),
    runs=runs,
)
