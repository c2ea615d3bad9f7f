"""Attention systems that papers compare with, next to ALiBi, sinusoids and rotary positions: the same text, order and weights.

Each is one file in `alibi_lab/lab/systems/` and uses only the interface of `lab/model/position_method.py`. Transformer-XL and
Shortformer read a training example in two segments; all others read it whole. Transformer-XL is also tested with other lengths
of memory (the curve "memory").
"""

import dataclasses

from alibi_lab.lab.config import EvalConfig, Method, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_lab.recipes.scales import LARGE, MEDIUM, TINY, by_method, trained_at

SYSTEMS: tuple[Method, ...] = (
    "alibi_lab.lab.systems.shaw:Shaw",
    "alibi_lab.lab.systems.transformer_xl:RelativeSinusoids",
    "alibi_lab.lab.systems.transformer_xl:TransformerXL",
    "alibi_lab.lab.systems.da_transformer:DATransformer",
    "alibi_lab.lab.systems.longformer:Longformer",
    "alibi_lab.lab.systems.shortformer:Shortformer",
    "alibi_lab.lab.systems.landmark:Landmark",
)
BUILT_IN: tuple[Method, ...] = ("alibi", "sinusoidal", "rotary")
_RUNS: dict[Scale, RunConfig] = {
    "smoke": RunConfig(
        model=dataclasses.replace(TINY.model, num_layers=2),
        train=TrainConfig(length=16, steps=2, batch_tokens=64, warmup_steps=1, log_every=1, checkpoint_every=2),
        eval=EvalConfig(lengths=(16, 64), tokens=64, batch_tokens=2048),
    ),
    "small": RunConfig(
        model=ModelConfig(num_layers=2, num_heads=4, embed_dim=64, ffn_dim=168),
        train=TrainConfig(length=64, steps=400, batch_tokens=2048, learning_rate=5e-3, warmup_steps=40),
        eval=EvalConfig(lengths=(64, 128, 256, 512), tokens=8192),
    ),
    "medium": trained_at(MEDIUM, 128, EvalConfig(lengths=(128, 256, 512, 1024), tokens=32_768)),
    "paper": trained_at(LARGE, 512, EvalConfig(lengths=(512, 1024, 2048, 4096), tokens=262_144, batch_tokens=65_536)),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """The built-in methods first, then every system."""
    return by_method(_RUNS[scale], (*BUILT_IN, *SYSTEMS))


RECIPE = Recipe(
    name="systems",
    question="Which attention systems of other papers work beyond their trained length, and which beat ALiBi within it?",
    paper="none: tables 7 and 10 compare with the published numbers of some of them",
    cost="small: about half a minute of one core per training, tests included; smoke: seconds; medium and paper: not run",
    expected=(
        "clipped distances, windows, segments with a memory and sinusoids of the distance keep their perplexity at eight times "
        "the trained length, as ALiBi does; absolute sinusoids and rotary positions do not (docs/lab-results.md)"
    ),
    runs=runs,
)
