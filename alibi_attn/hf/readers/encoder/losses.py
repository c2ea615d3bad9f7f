"""The losses of the heads. With `num_items`, the number of labels in all batches of one step, they are sums divided by it.

transformers' Trainer passes that number and then does not divide by the number of batches, so accumulated gradients are those of
one large batch.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig

IGNORED = -100  # a label without loss


def answer_loss(logits: Tensor, at: Tensor) -> Tensor:
    """Nats per row: logits [B, T] of where an answer starts or ends, and the true positions [B]; outside [0, T) = no loss."""
    at = at.to(logits.device).flatten()
    scores = logits if logits.dtype == torch.float64 else logits.float()
    inside = (at >= 0) & (at < logits.shape[1])
    losses = F.cross_entropy(scores, at.masked_fill(~inside, IGNORED), ignore_index=IGNORED, reduction="sum")
    return losses / inside.sum().clamp(min=1)


def token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Nats per label: logits [B, T, V], labels [B, T] with −100 = no loss."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(
        scores.flatten(0, 1), labels.to(logits.device).flatten(), ignore_index=IGNORED, reduction=_reduction(num_items)
    )
    return _per_item(loss, num_items)


def classification_loss(
    logits: Tensor, labels: Tensor, config: ALiBiBertConfig, num_items: Tensor | int | None
) -> Tensor:
    """Cross-entropy, binary cross-entropy or squared error of logits [B, num_labels].

    `config.problem_type` selects it. If it is None, one label is "regression", integers are "single_label_classification" and
    other labels "multi_label_classification", as in transformers; the config then keeps it.
    """
    labels = labels.to(logits.device)
    if config.problem_type is None:
        is_index = labels.dtype in (torch.int64, torch.int32)
        config.problem_type = "single_label_classification" if is_index else "multi_label_classification"
        if logits.shape[-1] == 1:
            config.problem_type = "regression"
    reduction = _reduction(num_items)
    if config.problem_type == "single_label_classification":
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction=reduction)
    elif config.problem_type == "regression":
        loss = F.mse_loss(logits, labels.reshape(logits.shape).to(logits.dtype), reduction=reduction)
    else:
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    return _per_item(loss, num_items)


def _reduction(num_items: Tensor | int | None) -> Literal["mean", "sum"]:
    return "mean" if num_items is None else "sum"


def _per_item(loss: Tensor, num_items: Tensor | int | None) -> Tensor:
    if num_items is None:
        return loss
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)
