"""The model and the training that recipes of ours share at `paper` scale: some 0.1 billion parameters, 1.3 billion tokens."""

from alibi_attn.lab.config import ModelConfig, TrainConfig

MODEL = ModelConfig(num_layers=12, num_heads=12, embed_dim=768, ffn_dim=2048)
TRAIN = TrainConfig(
    steps=20_000, batch_tokens=65_536, learning_rate=6e-4, warmup_steps=1000, precision="bf16", checkpoint_every=1000
)
