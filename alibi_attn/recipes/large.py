"""The model and training that recipes share at `paper` scale: about 0.1 billion parameters, 1.3 billion tokens."""

import dataclasses

from alibi_attn.lab.config import EvalConfig, Method, ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(num_layers=12, num_heads=12, embed_dim=768, ffn_dim=2048)
TRAIN = TrainConfig(
    steps=20_000, batch_tokens=65_536, learning_rate=6e-4, warmup_steps=1000, precision="bf16", checkpoint_every=1000
)


def run(method: Method, length: int, evaluation: EvalConfig) -> RunConfig:
    """A run that trains this model on the default text."""
    model, train = dataclasses.replace(MODEL, method=method), dataclasses.replace(TRAIN, length=length)
    return RunConfig(model=model, train=train, eval=evaluation)
