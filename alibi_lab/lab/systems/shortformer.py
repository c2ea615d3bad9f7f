"""Shortformer (Press et al. 2021, arXiv:2012.15832): position-infused attention with cached subsequences.

    q_i = W_q (x_i + p_i),  k_j = W_k (x_j + p_j),  v_j = W_v x_j        sec. 5; p: sinusoids, in every layer

No position enters x or the values, so the keys and values of an earlier subsequence stay valid when their positions change:
in every subsequence, the cached tokens have the positions 0 … M − 1 and its own tokens those that follow. A subsequence is half
the trained length and sees as many cached tokens, so no text of any length has an untrained position. The paper caches x instead
of W_k·x and W_v·x, which are the same numbers. Its other part, training on short inputs first, is `train.first_length`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod
from alibi_lab.lab.systems.transformer_xl import sinusoids
from alibi_lab.position_methods import Look


class Shortformer(PositionMethod):
    """Sinusoids added to the inputs of queries and keys in every layer, and not to those of values. No parameters."""

    relative = False
    look = Look("Shortformer", "#6a3d9a", "#c3a2ea", "_")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.segment: int | None = max(1, trained_length // 2)
        self.memory = self.segment

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        """`k` has no positions yet, so that the cache has none: W (x + p) = W x + W p."""
        p = sinusoids(torch.arange(k.shape[-2], device=k.device), self.config.embed_dim).to(q.dtype)
        return default(q + self._projected(p[-q.shape[-2] :], at, "q"), k + self._projected(p, at, "k"), v)

    def _projected(self, p: Tensor, at: Pass, name: str) -> Tensor:
        """W p without the bias, which the queries and keys have, [H, N, D]."""
        block = at.layer.block
        assert isinstance(block, nn.Module)
        weight = block.get_submodule(name).get_parameter("weight")
        return F.linear(p, weight.to(p.dtype)).unflatten(-1, (self.config.num_heads, -1)).transpose(0, 1)
