"""Relative position vectors (Shaw et al. 2018, arXiv:1803.02155), in the causal form: keys are never to the right.

    e_ij = q_i · (k_j + a^K_d) / √D         d = min(i − j, k), the clipped distance
    o_i  = Σ_j softmax(e_i)_j (v_j + a^V_d)

Every layer and head has its own vectors, as in the paper's base model. Next: `transformer_xl.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod
from alibi_lab.position_methods import Look

CLIP = 16  # k of the paper's base model


class Shaw(PositionMethod):
    """A learned vector per clipped distance, added to the keys, and another one added to the values.

    2·(k + 1)·D parameters per layer and head. All distances beyond k share a vector, so longer texts have no unseen ones.
    """

    look = Look("Shaw et al.", "#1b7f8c", "#6fd0dc", "2")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        shape = (config.num_layers, config.num_heads, CLIP + 1, config.embed_dim // config.num_heads)
        self.key_vectors, self.value_vectors = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        a_k, a_v = self.key_vectors[at.layer.index], self.value_vectors[at.layer.index]
        distance = at.distances(q.device).clamp(0, CLIP).expand(*q.shape[:-1], -1)  # keys to the right are hidden
        of_vectors = q @ a_k.mT.to(q.dtype)  # [B, H, T, k + 1]
        scores = (q @ k.mT + of_vectors.gather(-1, distance)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~at.visible(q.device), -math.inf).softmax(-1)
        weights = F.dropout(weights, self.config.attention_dropout, self.training)
        by_distance = torch.zeros_like(of_vectors, dtype=weights.dtype).scatter_add(-1, distance, weights)
        return (weights.to(v.dtype) @ v + by_distance.to(v.dtype) @ a_v.to(v.dtype)).to(q.dtype)
