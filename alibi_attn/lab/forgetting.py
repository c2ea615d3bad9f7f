"""Positions that the text itself makes: every token says how much of what came before it is kept."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn.lab.config import ModelConfig
from alibi_attn.lab.hooks import ForgetGates, Pass, PositionMethod, published_slopes


class Fox(PositionMethod):
    """A forget gate for every layer, head and token, sigmoid(w·x + b), that multiplies along the way (Lin et al. 2025).

    The score of key j gets Σ ln f_l over l = j + 1 … i. Gates are fp32. b starts at 0, as in the authors' code, so about half
    is kept of each token by the next at first. Short convolutions, output gates and QK-norm of their larger block are not part
    of it. Source: arXiv:2503.02130, eq. 9 to 12.
    """

    per_layer = True

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.gate_weight = nn.Parameter(torch.empty(config.num_layers, config.num_heads, config.embed_dim))
        self.gate_bias = nn.Parameter(torch.zeros(config.num_layers * config.num_heads))

    def bias(self, at: Pass) -> ForgetGates:
        return ForgetGates(self.log_fgate(at))

    def log_fgate(self, at: Pass) -> Tensor:
        """[B, H, T] fp32, of the layer that asks."""
        x, index = at.layer.x, at.layer.index
        with torch.autocast(x.device.type, enabled=False):
            bias = self.gate_bias.float().view(self.gate_weight.shape[:2])[index]
            logits = F.linear(x.float(), self.gate_weight[index].float(), bias)
        return F.logsigmoid(logits).transpose(1, 2)


class ALiBiFox(Fox):
    """Gates and the published slopes together: what the text does not forget, the distance does."""

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.slopes = published_slopes(config)

    def bias(self, at: Pass) -> ForgetGates:
        return ForgetGates(self.log_fgate(at), self.slopes)
