"""The model and training that recipes share at `medium` scale: 3.7 million parameters, 10 million tokens, two cores.

One training costs at most half an hour on one core with bf16 instructions (`results/medium/`), an hour on one with AVX2 only.
"""

import dataclasses

from alibi_attn.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(num_layers=4, num_heads=8, embed_dim=256, ffn_dim=688, vocab_size=2048)
DATA = DataConfig(tokenizer="bpe:2048", test_share=0.05)
TRAIN = TrainConfig(steps=2200, batch_tokens=4608, learning_rate=2e-3, warmup_steps=220, precision="bf16")


def run(method: Method, length: int, evaluation: EvalConfig) -> RunConfig:
    """A run that trains this model on this text."""
    model, train = dataclasses.replace(MODEL, method=method), dataclasses.replace(TRAIN, length=length)
    return RunConfig(model=model, data=DATA, train=train, eval=evaluation)
