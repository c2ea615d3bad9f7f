"""The models and trainings that recipes and the benchmark of trainings share, and how a recipe varies its runs.

medium: 3.7 million parameters, 10 million tokens, two cores. A training costs at most half an hour on one core with bf16
instructions (`results/medium.jsonl`), an hour on one with AVX2 only. paper: about 0.1 billion parameters, 1.3 billion tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, TrainConfig

SMOKE = RunConfig(
    model=ModelConfig(num_layers=2, num_heads=2, embed_dim=32, ffn_dim=88),
    train=TrainConfig(length=16, steps=8, batch_tokens=256, warmup_steps=2, log_every=2, checkpoint_every=4),
    eval=EvalConfig(lengths=(16, 32, 64), tokens=256, batch_tokens=256),
)
TINY = RunConfig(
    model=ModelConfig(num_layers=1, num_heads=2, embed_dim=16, ffn_dim=24),
    train=TrainConfig(steps=4, batch_tokens=128, warmup_steps=1, log_every=2, checkpoint_every=4),
    eval=EvalConfig(tokens=64, batch_tokens=2048),
)
SMALL = RunConfig(train=TrainConfig(batch_tokens=2048, learning_rate=3e-3), eval=EvalConfig(tokens=8192))
SMALLER = RunConfig(
    model=ModelConfig(num_layers=2, num_heads=4, embed_dim=64, ffn_dim=168), train=TrainConfig(learning_rate=5e-3)
)
MEDIUM = RunConfig(
    model=ModelConfig(num_layers=4, num_heads=8, embed_dim=256, ffn_dim=688, vocab_size=2048),
    data=DataConfig(tokenizer="bpe:2048", test_share=0.05),
    train=TrainConfig(steps=2200, batch_tokens=4608, learning_rate=2e-3, warmup_steps=220, precision="bf16"),
    eval=EvalConfig(tokens=32_768),
)
_LONG = TrainConfig(
    steps=20_000, batch_tokens=65_536, learning_rate=6e-4, warmup_steps=1000, precision="bf16", checkpoint_every=1000
)
LARGE = RunConfig(
    model=ModelConfig(num_layers=12, num_heads=12, embed_dim=768, ffn_dim=2048),
    train=_LONG,
    eval=EvalConfig(tokens=262_144, batch_tokens=65_536),
)


def changed(run: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """The run with fields of its sections changed.

    >>> changed(SMALL, model={"num_layers": 2}, train={"seed": 1}).train.seed
    1
    """
    parts = {name: dataclasses.replace(getattr(run, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(run, **parts)


def trained_at(run: RunConfig, lengths: tuple[int, ...], train: Mapping[str, Any] = {}, **test: Any) -> RunConfig:
    """The run trained at the first of these lengths and tested at all; `train` and `test` are further fields that change."""
    return changed(run, train={"length": lengths[0], **train}, eval={"lengths": lengths, **test})


def by_method(run: RunConfig, methods: Sequence[Method]) -> tuple[RunConfig, ...]:
    """The run with each position method."""
    return tuple(changed(run, model={"method": method}) for method in methods)


TWO_STEPS = changed(TINY, train={"length": 16, "steps": 2, "batch_tokens": 64, "log_every": 1, "checkpoint_every": 2})
