"""The two optimizers, and the learning rate as a function of the step.

"adamw" is the usual choice for language models today; "nag", Nesterov's momentum, is the paper's (fairseq's
`--optimizer nag --lr-scheduler cosine`). Read next: `train.py`.
"""

import math

import torch
from torch import nn

from alibi_lab.lab.config import Optimizer, TrainConfig

BETAS = (0.9, 0.95)  # of AdamW
MOMENTUM = 0.99  # fairseq's default, and Baevski and Auli 2019, sec. 4.5
NAG_FIRST_RATE = 1e-7  # the rate at the start of the warm-up of "nag": the paper's --warmup-init-lr


def make_optimizer(model: nn.Module, kind: Optimizer, rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """The optimizer of this kind, with weight decay for the matrices in the blocks only.

    "nag" is torch's SGD with momentum 0.99 and `nesterov=True`. fairseq stores −rate·b where SGD stores b, and corrects
    by the ratio of two steps' rates, so the updates are equal for every schedule. Weight decay differs, but the paper
    uses none: here it is added to the gradient, in fairseq it shrinks the weights by rate·decay.
    """
    decayed = [parameter for name, parameter in model.named_parameters() if "blocks." in name and parameter.ndim > 1]
    others = [parameter for name, parameter in model.named_parameters() if "blocks." not in name or parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if kind == "nag":
        return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, nesterov=True)
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, counted from 0: a linear warm-up to `learning_rate`, then a cosine to `final_share` of it.

    The warm-up of "adamw" starts at 1/warmup_steps of the rate; that of "nag" at 1e-7, as in fairseq's scheduler.

    >>> [round(learning_rate(step, TrainConfig(warmup_steps=2, steps=6, learning_rate=1.0)), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < config.warmup_steps:
        if config.optimizer == "nag":
            return NAG_FIRST_RATE + step * (config.learning_rate - NAG_FIRST_RATE) / config.warmup_steps
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * share
