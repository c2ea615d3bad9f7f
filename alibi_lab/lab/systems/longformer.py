"""Longformer (Beltagy et al. 2020, arXiv:2004.05150), in the causal form: windows, and a few tokens that all others see.

A query sees the last w_l tokens, itself included, and the first g tokens of the text. As in the paper, w_l is smaller in lower
layers: half the trained length in the last one, half as many in each one below. The paper's language models have relative
sinusoidal positions and no global tokens; its encoders have global tokens, with separate projections for their queries. Here the
global tokens are the first g, which attend to at most g keys, so the separate projections are left out, as is dilation. A
global key outside of the window is scored by its content alone, because its distance can exceed all trained ones.

Computed with a mask, so it shows what the pattern predicts, not its speed. Next: `shortformer.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_lab.lab.model.position_method import Attention, Pass
from alibi_lab.lab.systems.transformer_xl import RelativeSinusoids
from alibi_lab.position_methods import Look

GLOBAL_TOKENS = 4
LEAST_WINDOW = 4


class Longformer(RelativeSinusoids):
    """Windows that grow from layer to layer, the first tokens for all, and Transformer-XL's positions in the window."""

    relative = False  # the first tokens of a row are not those of its documents
    look = Look("Longformer", "#2a6f3c", "#8fd6a1", ".")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        near = at.distances(q.device) < self.layer_window(at.layer.index)
        content, position = self.scores(q, k, at.layer.index)
        scores = content + position.where(near, torch.zeros_like(position))
        first = torch.arange(at.key_len, device=q.device) < GLOBAL_TOKENS
        seen = at.visible(q.device) & (near | first)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return F.dropout(weights, self.config.attention_dropout, self.training).to(v.dtype) @ v

    def layer_window(self, layer: int) -> int:
        """The number of tokens that a query of this layer sees, itself included."""
        return max(LEAST_WINDOW, self.trained_length >> (self.config.num_layers - layer))
