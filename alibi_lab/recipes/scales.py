"""The models and trainings that recipes share at the scales `smoke`, `medium` and `paper`, and how a recipe varies its runs.

medium: 3.7 million parameters, 10 million tokens, two cores. A training costs at most half an hour on one core with bf16
instructions (`results/medium/`), an hour on one with AVX2 only. paper: about 0.1 billion parameters, 1.3 billion tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, TrainConfig

TINY = RunConfig(
    model=ModelConfig(num_layers=1, num_heads=2, embed_dim=16, ffn_dim=24),
    train=TrainConfig(steps=4, batch_tokens=128, warmup_steps=1, log_every=2, checkpoint_every=4),
)
MEDIUM = RunConfig(
    model=ModelConfig(num_layers=4, num_heads=8, embed_dim=256, ffn_dim=688, vocab_size=2048),
    data=DataConfig(tokenizer="bpe:2048", test_share=0.05),
    train=TrainConfig(steps=2200, batch_tokens=4608, learning_rate=2e-3, warmup_steps=220, precision="bf16"),
)
LARGE = RunConfig(
    model=ModelConfig(num_layers=12, num_heads=12, embed_dim=768, ffn_dim=2048),
    train=TrainConfig(
        steps=20_000,
        batch_tokens=65_536,
        learning_rate=6e-4,
        warmup_steps=1000,
        precision="bf16",
        checkpoint_every=1000,
    ),
)


def trained_at(run: RunConfig, length: int, evaluation: EvalConfig, **train: Any) -> RunConfig:
    """The run with examples of this length, this evaluation, and further fields of its training changed."""
    return dataclasses.replace(run, train=dataclasses.replace(run.train, length=length, **train), eval=evaluation)


def with_model(run: RunConfig, **model: Any) -> RunConfig:
    """The run with fields of its model changed."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **model))


def by_method(run: RunConfig, methods: Sequence[Method]) -> tuple[RunConfig, ...]:
    """The run with each position method."""
    models = (dataclasses.replace(run.model, method=method) for method in methods)
    return tuple(dataclasses.replace(run, model=model) for model in models)
