"""Recall: nine position methods learn to repeat a segment within 64 tokens; the test moves it up to 1,000 tokens back.

Paper: none; its perplexities leave this question open (section 5: what looks like use of a longer context is mostly fewer
early tokens). Every training example is one document of the recall task (`lab/data/tasks.py`), and the test measures recall
at every distance in longer texts. It distinguishes methods that use a longer context from those that only survive it.
"""

import dataclasses

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_lab.recipes.scales import LARGE, MEDIUM, TINY, by_method, trained_at, with_model

COMPARED: tuple[Method, ...] = (
    "none",
    "sinusoidal",
    "rotary",
    "t5",
    "alibi",
    "alibi-half",
    "kerple",
    "fox",
    "alibi-fox",
)
_LENGTHS = (64, 128, 256, 512, 1024)
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(TINY, 32, EvalConfig(lengths=(32, 64), tokens=64, batch_tokens=2048), warmup_steps=2),
    "small": RunConfig(
        model=ModelConfig(num_layers=2, num_heads=4, embed_dim=64, ffn_dim=168),
        train=TrainConfig(length=64, steps=300, batch_tokens=2048, learning_rate=5e-3, warmup_steps=40),
        eval=EvalConfig(lengths=_LENGTHS, tokens=4096),
    ),
    "medium": with_model(trained_at(MEDIUM, 64, EvalConfig(lengths=(*_LENGTHS, 2048), tokens=8192)), vocab_size=256),
    "paper": trained_at(
        LARGE,
        512,
        EvalConfig(lengths=(512, 1024, 2048, 4096, 8192, 16_384), tokens=65_536, batch_tokens=65_536),
        steps=5_000,
        warmup_steps=500,
    ),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """The same model, documents, order and seed for every method; documents are as long as the training examples."""
    run = _RUNS[scale]
    data, test = DataConfig(corpus=f"task:recall:{run.train.length}"), dataclasses.replace(run.eval, tasks=("recall",))
    return by_method(dataclasses.replace(run, data=data, eval=test), COMPARED)


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
