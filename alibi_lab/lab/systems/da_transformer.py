"""DA-Transformer (Wu et al. 2021, arXiv:2010.06925), in the causal form: scores are multiplied by a function of the distance.

    a_i = softmax_j( ReLU(q_i · k_j) · f(w·(i − j)) / √D )       f(x) = (1 + e^v) / (1 + e^(v − x))

w and v are learned numbers per layer and head. f(0) = 1; with w > 0, f rises to 1 + e^v and the head prefers distant keys,
with w < 0 it falls to 0 and the head prefers near ones. A score of 0 is not a weight of 0: every visible key keeps e^0.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod
from alibi_lab.position_methods import Look


class DATransformer(PositionMethod):
    """2 parameters per layer and head. w starts evenly spread from −1 to 1 over the heads, v at 0: our choice."""

    look = Look("DA-Transformer", "#b0305c", "#f08cae", "4")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.w = nn.Parameter(torch.linspace(-1, 1, config.num_heads).repeat(config.num_layers))
        self.v = nn.Parameter(torch.zeros(config.num_layers * config.num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        distance = at.distances(q.device).clamp(min=0)  # keys to the right are hidden
        factor = self.factors(at.key_len, at.layer.index)[:, distance]
        scores = (q @ k.mT).relu() * factor.to(q.dtype) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~at.visible(q.device), -math.inf).softmax(-1)
        return F.dropout(weights, self.config.attention_dropout, self.training).to(v.dtype) @ v

    def factors(self, key_len: int, layer: int) -> Tensor:
        """f of the distances 0 … S − 1, [H, S] fp32, as e^(softplus(v) − softplus(v − w·d)), which never overflows."""
        w, v = (each.float().view(self.config.num_layers, -1, 1)[layer] for each in (self.w, self.v))
        distance = torch.arange(key_len, device=w.device)
        return (F.softplus(v) - F.softplus(v - w * distance)).exp()
