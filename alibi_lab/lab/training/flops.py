"""FLOPs of a training step, and the rate of a GPU's matrix products, to which a training's speed is compared (MFU).

    utilization = FLOPs of the model per token · tokens per second / rate of a large matrix product

(Chowdhery et al. 2022, PaLM, appendix B, arXiv:2204.02311). `measure/training.py` measures it on a CPU.
"""

from collections.abc import Mapping

import torch

from alibi_lab.lab.clock import cuda_ms
from alibi_lab.lab.config import ModelConfig, Precision, RunConfig

DTYPES: Mapping[Precision, torch.dtype] = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MATRIX_SIZE, _PRODUCTS = 8192, 10  # 11 TFLOP, 14 ms on an H100 in bf16


def linear_flops(config: RunConfig) -> int:
    """6 · parameters · rows · length: the FLOPs of the linear layers in a training step, forward (a third) and backward.

    A multiplication and an addition count as two. Norms, activations, softmax, the loss, the optimizer and position methods
    count as zero.
    """
    return 6 * multiplying_parameters(config.model) * config.train.batch_tokens


def attention_flops(config: RunConfig) -> int:
    """12 · layers · heads · head_dim · pairs, with pairs = rows · length · (length + 1) / 2, in a training step.

    Every pair of a query and a visible key counts once, so causality halves attention; PaLM's formula, with
    12 · layers · heads · head_dim · length per token, counts the hidden pairs too. Recomputation in backward does not
    count; scores that a certificate skips do: these are the model's FLOPs, not those of an implementation.
    """
    pairs = config.train.batch_tokens * (config.train.length + 1) // 2
    return 12 * config.model.num_layers * config.model.embed_dim * pairs


def multiplying_parameters(model: ModelConfig) -> int:
    """The number of parameters in the matrices that multiply every token.

    These are q, k, v and output, the feed-forward part (three matrices in "modern"), and the projection to the
    vocabulary; not the norms, and not the input embeddings, which are looked up.
    """
    feed_forward = (3 if model.architecture == "modern" else 2) * model.ffn_dim
    in_layers = model.num_layers * (4 * model.embed_dim + feed_forward)
    return model.embed_dim * (in_layers + model.vocab_size)


def matrix_flops_per_second(device: torch.device, precision: Precision) -> float | None:
    """The measured rate of a large matrix product in the training's dtype on a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    matrix = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=device, dtype=DTYPES[precision])
    torch.mm(matrix, matrix)  # warm-up
    return 2 * _MATRIX_SIZE**3 / (cuda_ms(lambda: matrix @ matrix, _PRODUCTS) / 1e3)


def full_tokens_per_second(config: RunConfig, matrix_rate: float) -> float:
    """The tokens per second of a training whose FLOPs all run at this rate: a utilization of 1."""
    return matrix_rate * config.train.batch_tokens / (linear_flops(config) + attention_flops(config))
