"""Recall: nine position methods learn to repeat a segment within 64 tokens; the test moves it up to 1,000 tokens back.

Paper: none; its perplexities leave this question open (section 5: what looks like use of a longer context is mostly fewer
early tokens). Every training example is one document of the recall task (`lab/data/tasks.py`), and the test measures recall
at every distance in longer texts. It distinguishes methods that use a longer context from those that only survive it.
"""

from dataclasses import replace

from alibi_lab.lab.config import DataConfig, Method, Recipe, RunConfig, Scale
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALLER, TINY, by_method, changed, trained_at

_NAMES = "none sinusoidal rotary t5 alibi alibi-half kerple fox alibi-fox"
COMPARED: tuple[Method, ...] = tuple(_NAMES.split())
_LENGTHS = (64, 128, 256, 512, 1024)
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(TINY, (32, 64), {"warmup_steps": 2}),
    "small": trained_at(SMALLER, _LENGTHS, {"steps": 300, "batch_tokens": 2048, "warmup_steps": 40}, tokens=4096),
    "medium": changed(trained_at(MEDIUM, (*_LENGTHS, 2048), tokens=8192), model={"vocab_size": 256}),
    "paper": trained_at(
        LARGE, (512, 1024, 2048, 4096, 8192, 16_384), {"steps": 5_000, "warmup_steps": 500}, tokens=65_536
    ),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """The same model, documents, order and seed for every method; documents are as long as the training examples."""
    run = changed(_RUNS[scale], eval={"tasks": ("recall",)})
    return by_method(replace(run, data=DataConfig(corpus=f"task:recall:{run.train.length}")), COMPARED)


RECIPE = Recipe(
    name="recall",
    question="Trained to repeat a segment within 64 tokens, which position methods can still do so 1,000 tokens back?",
    paper="none: a question that section 5's perplexities leave open",
    cost="small: about a minute per method on two cores (three measured on a busy machine); smoke: seconds; paper: not run",
    expected=(
        "nearly every token is recalled within the trained length (chance is a quarter); beyond it, ALiBi recalls nearby tokens "
        "at any text length and fewer the farther back they are, no positions lose least, and rotary loses nearby ones too; "
        "forget gates, which start at a half, are still at chance after 300 steps (docs/log.md)"
    ),
    runs=runs,
)
