"""The 1.3-billion-parameter models of section 4.2 (CC100 + RoBERTa's corpus, 461 GB), trained for one epoch.

Published: 25 layers, width 2048, 16 heads, ffn 8192, 50,000 updates, 128 V100. Derived: 2 million tokens per update, from
461 GB in 50,000 updates. Not published, chosen here: AdamW with a learning rate of 2e-4, and 50,000 byte pairs. The corpus is
not available as one dataset on the hub: OpenWebText, a part of it, replaces it; --text sets another.
small and medium: 16 heads as published, a larger model than in the other studies, half as many tokens, more byte pairs.
"""

import dataclasses

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, Scale, TrainConfig
from alibi_lab.recipes.paper.cells import scaled
from alibi_lab.recipes.scales import with_model

TRAINED = (512, 1024, 2048)
# figure 6 ends at 10,000; the lengths in between are our choice
EXTRAPOLATED = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10_000)
_FIGURE_5 = {("alibi", 512): 1024, ("sinusoidal", 1024): 1024, ("alibi", 1024): 2048, ("sinusoidal", 2048): 2048}


def training(method: Method, paper_length: int, scale: Scale) -> RunConfig:
    """The run of a method trained at a length of the paper; those of figure 5 are validated during training."""
    train = dataclasses.replace(_TRAIN[scale], length=scaled(paper_length, scale))
    if (method, paper_length) in _FIGURE_5:
        length, every = scaled(_FIGURE_5[method, paper_length], scale), max(1, train.steps // 20)
        train = dataclasses.replace(train, validate_every=every, validate_length=length, validate_tokens=_TOKENS[scale])
    evaluation = _evaluation(scale, TRAINED, paper_length)
    return with_model(RunConfig(model=_MODEL[scale], data=_DATA[scale], train=train, eval=evaluation), method=method)


def tested_beyond(run: RunConfig, paper_length: int, scale: Scale) -> RunConfig:
    """The run evaluated at lengths up to 10,000 tokens (figure 6)."""
    return dataclasses.replace(run, eval=_evaluation(scale, extrapolation_lengths(paper_length, scale), paper_length))


def extrapolation_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each L_valid of figure 6 from L on; at smoke scale at most three."""
    lengths = tuple(length for length in EXTRAPOLATED if length >= paper_length)
    return lengths if scale != "smoke" else tuple(length for length in lengths if length in (512, 1024, 2048))


def validated_at(method: Method, paper_length: int) -> int:
    """The L_valid of a curve of figure 5."""
    return _FIGURE_5[method, paper_length]


def _evaluation(scale: Scale, paper_lengths: tuple[int, ...], trained: int) -> EvalConfig:
    lengths = tuple(scaled(length, scale) for length in paper_lengths if length >= trained)
    return EvalConfig(lengths=lengths, tokens=_TOKENS[scale], batch_tokens=_BATCH[scale])


_MODEL: dict[Scale, ModelConfig] = {
    "smoke": ModelConfig(num_layers=1, num_heads=4, embed_dim=32, ffn_dim=64),
    "small": ModelConfig(num_layers=4, num_heads=16, embed_dim=192, ffn_dim=512, vocab_size=4096),
    "medium": ModelConfig(num_layers=6, num_heads=16, embed_dim=256, ffn_dim=688, vocab_size=4096),
    "paper": ModelConfig(
        architecture="baevski-auli", num_layers=25, num_heads=16, embed_dim=2048, ffn_dim=8192, vocab_size=50_000
    ),
}
_PAIRS = DataConfig(tokenizer="bpe:4096", test_share=0.05)
_DATA: dict[Scale, DataConfig] = {
    "smoke": DataConfig(test_share=0.05, valid_share=0.15),
    "small": _PAIRS,
    "medium": _PAIRS,
    "paper": DataConfig(corpus="hub:Skylion007/openwebtext", tokenizer="bpe:50000"),
}
_TRAIN: dict[Scale, TrainConfig] = {
    "smoke": TrainConfig(length=1, steps=4, batch_tokens=96, warmup_steps=1, log_every=2, checkpoint_every=4),
    "small": TrainConfig(
        length=64, steps=200, batch_tokens=1536, learning_rate=2e-3, warmup_steps=20, checkpoint_every=100
    ),
    "medium": TrainConfig(
        length=128, steps=1300, batch_tokens=4608, learning_rate=2e-3, warmup_steps=130, precision="bf16"
    ),
    "paper": TrainConfig(
        length=512,
        steps=50_000,
        batch_tokens=128 * 16_384,
        learning_rate=2e-4,
        warmup_steps=2000,
        seed=1,
        precision="fp16",
        parallel="fsdp",
        activation_checkpointing=True,
        log_every=100,
        checkpoint_every=1000,
    ),
}
_TOKENS: dict[Scale, int] = {"smoke": 96, "small": 8192, "medium": 32_768, "paper": 649_000}
_BATCH: dict[Scale, int] = {"smoke": 4096, "small": 8192, "medium": 8192, "paper": 65_536}
