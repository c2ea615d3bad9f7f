"""The two optimizers, and the learning rate as a function of the step.

"adamw" is what language models are trained with today; "nag", Nesterov's momentum, is what the paper's were (fairseq's
`--optimizer nag --lr-scheduler cosine`). Read next: `train.py`.
"""

import math

import torch
from torch import nn

from alibi_attn.lab.config import TrainConfig

BETAS = (0.9, 0.95)  # of AdamW
MOMENTUM = 0.99  # fairseq's default, and Baevski and Auli 2019, sec. 4.5
NAG_FIRST_RATE = 1e-7  # where the warm-up of "nag" begins: the paper's --warmup-init-lr


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names; it decays the matrices inside the blocks, and neither norms, embeddings nor positions.

    "nag" is torch's SGD with momentum 0.99 and nesterov. fairseq keeps −rate·b where SGD keeps b, and corrects by the ratio of
    two steps' rates: the same updates, whatever the rate does. Weight decay differs, and the paper has none: here it is
    part of the gradient, in fairseq it shrinks the weights by rate·decay.
    """
    decayed = [parameter for name, parameter in model.named_parameters() if "blocks." in name and parameter.ndim > 1]
    others = [parameter for name, parameter in model.named_parameters() if "blocks." not in name or parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.optimizer == "nag":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=MOMENTUM, nesterov=True)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, counted from 0: rising to `learning_rate`, then half a cosine down to `final_share` of it.

    "adamw" rises by 1/warmup_steps of the rate from the first step on; "nag" from 1e-7, as fairseq's scheduler does.

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
