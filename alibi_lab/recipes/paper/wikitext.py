"""The models of sections 2.2 and 4.1 (WikiText-103), and every way in which the paper evaluates them.

paper: Baevski & Auli's model with the authors' published training command, 8 GPUs with 9,216 tokens each.
small: an eighth of every length, byte pairs of the local text, a modern decoder of 1 million weights with the paper's
8 heads, AdamW; the same text in the same order for every method at every length.
medium: a quarter of every length, 3.7 million weights, 10 million tokens per training, matrix products in bf16.
gpu: half of the paper's layers, at its width, heads and lengths; byte pairs, one embedding, AdamW, bf16, compiled layers.
Planned for ten minutes on one H100, whose matrix products run at 790 TFLOP/s in bf16:
    per token   6 · (8 · 12 · 1024² + 8192 · 1024) + 12 · 8 · 1024 · 513/2 = 679.5 MFLOP
    per step    32,768 tokens, 22.3 TFLOP, 81 ms at a utilization of 35 %
    in all      7,400 steps, 242 million tokens, 596 s
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, Scale, Split, TrainConfig
from alibi_lab.recipes.paper.cells import scaled
from alibi_lab.recipes.scales import MEDIUM, with_model

TRAINED = (64, 128, 256, 512, 1024, 1536, 2048, 3072)  # L, table 5
LONGEST = 3072
_FEW = (512, 1024, LONGEST)  # L, tables 2 to 4
STRIDE = 512  # S of tables 7 and 10
# How far beyond L tables 2–4 go: all of their steps, and a selection for the smaller scales.
_PAPER_STEPS = (0, 1, *range(10, 101, 10), *range(200, 1001, 100), *range(2000, 15_001, 1000))
_SOME_STEPS = (0, 100, 500, 1000, 2000, 3000, 5000, 7000, 10_000, 13_000, 15_000)
_STEPS: dict[Scale, tuple[int, ...]] = {
    "smoke": (0, 100, 1000, 2000),
    "small": (0, 20, 100, 500, 2000, 5000, 10_000, 15_000),
    "medium": _SOME_STEPS,
    "gpu": _SOME_STEPS,
    "paper": _PAPER_STEPS,
}
_LAST_STEP = {512: 15_000, 1024: 15_000, 3072: 13_000}
# Staged training (Press et al. 2021, "Shortformer"; their best: 50 of 205 epochs at 128 tokens, from memory).
_FIRST_LENGTH, _FIRST_SHARE = 128, 50 / 205


def training(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The run of a method trained at a length of the paper; `staged` trains on short examples first."""
    length = scaled(paper_length, scale)
    train = dataclasses.replace(_TRAIN[scale], length=length)
    if scale == "paper" and length == LONGEST:
        train = dataclasses.replace(train, accumulate=3)  # --max-tokens 3072 --update-freq 3
    if staged:
        first = max(1, round(_FIRST_SHARE * train.steps))
        train = dataclasses.replace(train, first_length=scaled(_FIRST_LENGTH, scale), first_steps=first)
    return with_model(RunConfig(model=_MODEL[scale], data=_DATA[scale], train=train), method=method)


def trained_lengths(scale: Scale) -> tuple[int, ...]:
    """Each L of table 5; at medium scale, where one training costs half an hour, only those of tables 2 to 4; at gpu 512."""
    return {"medium": _FEW, "gpu": _FEW[:1]}.get(scale, TRAINED)


def extrapolation_lengths(paper_length: int, scale: Scale) -> tuple[int, ...]:
    """Each published L_valid of tables 2–4; a selection below paper scale."""
    return tuple(paper_length + step for step in _STEPS[scale] if step <= _LAST_STEP[paper_length])


def tested_beyond(run: RunConfig, paper_length: int, scale: Scale) -> RunConfig:
    """The run evaluated far beyond the trained length (tables 2–4, figure 1)."""
    return _tested(run, scale, extrapolation_lengths(paper_length, scale))


def tested_to_longest(run: RunConfig, scale: Scale, *paper_lengths: int) -> RunConfig:
    """The run evaluated at these lengths and at 3,072, so that all models score the same tokens (table 5, figures 4 and 8)."""
    return _tested(run, scale, sorted({*paper_lengths, LONGEST}))


def tested_with_stride(run: RunConfig, scale: Scale, split: Split) -> RunConfig:
    """The run evaluated at 3,072 tokens, nonoverlapping and with S = 512, on one split (tables 6, 7, 9 and 10)."""
    return _tested(run, scale, [LONGEST], stride=scaled(STRIDE, scale), split=split)


def tested_with_stride_1(run: RunConfig, scale: Scale, *paper_lengths: int) -> RunConfig:
    """The run evaluated with S = 1, one full window per token; few tokens below paper scale (tables 13–15, figure 11)."""
    tokens = {"paper": _TOKENS["paper"], "medium": 512, "small": 768, "smoke": 48}[scale]
    return _tested(run, scale, sorted({*paper_lengths, LONGEST}), tokens=tokens, stride=1)


def _tested(run: RunConfig, scale: Scale, paper_lengths: Sequence[int], **options: Any) -> RunConfig:
    """The run evaluated at these lengths of the paper; `options` are further fields of its evaluation."""
    lengths = tuple(scaled(length, scale) for length in paper_lengths)
    options = {"tokens": _TOKENS[scale], "batch_tokens": _BATCH[scale], **options}
    return dataclasses.replace(run, eval=EvalConfig(lengths=lengths, **options))


_MODEL: dict[Scale, ModelConfig] = {
    "smoke": ModelConfig(num_layers=1, num_heads=2, embed_dim=32, ffn_dim=64),
    "small": ModelConfig(num_layers=4, num_heads=8, embed_dim=128, ffn_dim=344, vocab_size=2048),
    "medium": MEDIUM.model,
    "gpu": ModelConfig(
        architecture="baevski-auli",
        num_layers=8,
        num_heads=8,
        embed_dim=1024,
        ffn_dim=4096,
        vocab_size=8192,
        dropout=0.1,
    ),
    "paper": ModelConfig(
        architecture="baevski-auli",
        num_layers=16,
        num_heads=8,
        embed_dim=1024,
        ffn_dim=4096,
        vocab_size=267_735,
        cutoffs=(20_000, 60_000),
        dropout=0.3,
        attention_dropout=0.1,
        activation_dropout=0.1,
        softmax_dropout=0.2,
    ),
}
_WIKITEXT_103 = "hub:Salesforce/wikitext:wikitext-103-v1"
_DATA: dict[Scale, DataConfig] = {
    "smoke": DataConfig(test_share=0.05),
    "small": DataConfig(tokenizer="bpe:2048", test_share=0.05),
    "medium": MEDIUM.data,
    "gpu": DataConfig(corpus=_WIKITEXT_103, tokenizer="bpe:8192"),
    "paper": DataConfig(corpus=_WIKITEXT_103, tokenizer="words"),
}
_TRAIN: dict[Scale, TrainConfig] = {
    "smoke": TrainConfig(length=1, steps=4, batch_tokens=96, warmup_steps=1, log_every=2, checkpoint_every=4),
    "small": TrainConfig(
        length=64, steps=340, batch_tokens=1536, learning_rate=3e-3, warmup_steps=34, checkpoint_every=170
    ),
    "medium": MEDIUM.train,
    "gpu": TrainConfig(
        length=512,
        steps=7400,
        batch_tokens=32_768,
        learning_rate=6e-4,
        warmup_steps=740,
        precision="bf16",
        compile=True,
        log_every=20,
        checkpoint_every=1000,
    ),
    "paper": TrainConfig(
        length=512,
        steps=286_000,
        batch_tokens=8 * 9216,
        optimizer="nag",
        learning_rate=1.0,
        final_share=1e-4,
        warmup_steps=16_000,
        weight_decay=0.0,
        clip_norm=0.1,
        seed=1,
        precision="fp16",
        log_every=100,
        checkpoint_every=2000,
    ),
}
# At the scale `paper`, the whole validation set.
_TOKENS: dict[Scale, int] = {"smoke": 96, "small": 8192, "medium": 32_768, "gpu": 131_072, "paper": 217_646}
_BATCH: dict[Scale, int] = {"smoke": 4096, "small": 8192, "medium": 8192, "gpu": 65_536, "paper": 65_536}
