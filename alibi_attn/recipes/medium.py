"""The model and the training that recipes share at `medium` scale: 3.7 million parameters, 10 million tokens, two cores.

A training takes half an hour or less of one core that multiplies bf16 (`results/medium/`), an hour of one that has AVX2 alone.
"""

from alibi_attn.lab.config import DataConfig, ModelConfig, TrainConfig

MODEL = ModelConfig(num_layers=4, num_heads=8, embed_dim=256, ffn_dim=688, vocab_size=2048)
DATA = DataConfig(tokenizer="bpe:2048", test_share=0.05)
TRAIN = TrainConfig(steps=2200, batch_tokens=4608, learning_rate=2e-3, warmup_steps=220, precision="bf16")
