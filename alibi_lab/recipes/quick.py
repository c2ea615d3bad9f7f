"""Does a model trained at 128 tokens still work at 2,048? Four position methods, on any computer.

Paper: figure 1 and section 2.2 (Press et al. 2022) at a small scale: bytes instead of words, the source of Python's standard
library instead of WikiText-103, 0.8 million parameters instead of 247 million, a thirtieth of an epoch instead of 205 epochs.
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALL, SMOKE, by_method, trained_at

COMPARED: tuple[Method, ...] = ("sinusoidal", "rotary", "t5", "alibi")
_LENGTHS = (128, 256, 512, 1024, 2048)
_RUNS: dict[Scale, RunConfig] = {
    "smoke": SMOKE,
    "small": trained_at(SMALL, _LENGTHS),
    "medium": trained_at(MEDIUM, (*_LENGTHS, 4096)),
    "paper": trained_at(LARGE, _LENGTHS),
}


RECIPE = Recipe(
    name="quick",
    question="Trained at 128 tokens, which position methods still predict well at 256, 512, 1,024 and 2,048?",
    paper="figure 1 and section 2.2, at a small scale",
    cost="small: two to five minutes on two cores; smoke: seconds; paper: hours on one GPU (not measured)",
    expected=(
        "ALiBi's perplexity does not rise beyond 128 tokens; sinusoidal and rotary rise steeply; "
        "T5 bias rises less: examples this short barely train its distant buckets"
    ),
    runs=lambda scale: by_method(_RUNS[scale], COMPARED),  # the same model, data, order and seed for every method
)
