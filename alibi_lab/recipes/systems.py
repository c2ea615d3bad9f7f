"""Attention systems that papers compare with, next to ALiBi, sinusoids and rotary positions: the same text, order and weights.

Each is one file in `alibi_lab/lab/systems/` and uses only the interface of `lab/model/position_method.py`. Transformer-XL and
Shortformer read a training example in two segments; all others read it whole. Transformer-XL is also tested with other lengths
of memory (the curve "memory").
"""

from alibi_lab.lab.config import Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALLER, TWO_STEPS, by_method, changed, trained_at

_SYSTEMS = (
    "shaw:Shaw transformer_xl:RelativeSinusoids transformer_xl:TransformerXL da_transformer:DATransformer "
    "longformer:Longformer shortformer:Shortformer landmark:Landmark"
)
SYSTEMS: tuple[Method, ...] = tuple(f"alibi_lab.lab.systems.{name}" for name in _SYSTEMS.split())
BUILT_IN: tuple[Method, ...] = ("alibi", "sinusoidal", "rotary")
_SMALL = changed(SMALLER, train={"steps": 400, "batch_tokens": 2048, "warmup_steps": 40})
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(changed(TWO_STEPS, model={"num_layers": 2}), (16, 64)),
    "small": trained_at(_SMALL, (64, 128, 256, 512), tokens=8192),
    "medium": trained_at(MEDIUM, (128, 256, 512, 1024)),
    "paper": trained_at(LARGE, (512, 1024, 2048, 4096)),
}


RECIPE = Recipe(
    name="systems",
    question="Which attention systems of other papers work beyond their trained length, and which beat ALiBi within it?",
    paper="none: tables 7 and 10 compare with the published numbers of some of them",
    cost="small: about half a minute of one core per training, tests included; smoke: seconds; medium and paper: not run",
    expected=(
        "clipped distances, windows, segments with a memory and sinusoids of the distance keep their perplexity at eight times "
        "the trained length, as ALiBi does; absolute sinusoids and rotary positions do not (docs/lab-results.md)"
    ),
    runs=lambda scale: by_method(_RUNS[scale], (*BUILT_IN, *SYSTEMS)),
)
