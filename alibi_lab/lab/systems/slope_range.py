"""ALiBi with other sets of slopes than the published one (Press et al. 2022, sec. 3, arXiv:2108.12409).

The authors tried about ten sets by hand on WikiText-103. They report that the best ones are within (0, 1) and denser toward 0,
that the choice matters little, that random slopes from an exponential distribution worked in some cases with a high variance,
and that trained slopes did not extrapolate well. They do not list the sets. With h = 1 … H, the ones here are

    Flattest4, 16, 4096, 65536    2^(−E·h/H) for E = 2, 4, 12 and 16; the flattest slope is 1/4 … 1/65,536. Published: E = 8
    AboveOne                      8·2^(−8·h/H): the published range, moved up to 1/32 … 4
    Uniform                       h/(H + 1): within (0, 1), not denser toward 0
    Exponential                   drawn from the exponential distribution of mean 1, with the seed of the training

Trained slopes are the built-in `alibi-learned`. `alibi run slopes` (`recipes/slope_search.py`) compares all of them.
"""

import math

import torch
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import Pass, PositionMethod
from alibi_lab.position_methods import Look


class Geometric(PositionMethod):
    """Slopes first·2^(−exponent·h/H), h = 1 … H; the published ones by default."""

    first, exponent = 1.0, 8.0

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        heads = torch.arange(1, config.num_heads + 1, dtype=torch.float32)
        self.slopes = nn.Buffer(self.first * torch.exp2(-self.exponent * heads / config.num_heads), persistent=False)

    def bias(self, at: Pass) -> Tensor:
        return self.slopes


class Flattest4(Geometric):
    """2^(−2·h/H)."""

    exponent = 2.0
    look = Look("slopes to 1/4", "#0b6fb8", "#5fb3f2", "s")


class Flattest16(Geometric):
    """2^(−4·h/H)."""

    exponent = 4.0
    look = Look("slopes to 1/16", "#097d5d", "#45cfa3", "^")


class Flattest4096(Geometric):
    """2^(−12·h/H)."""

    exponent = 12.0
    look = Look("slopes to 1/4,096", "#8b3fa8", "#d291ea", "D")


class Flattest65536(Geometric):
    """2^(−16·h/H)."""

    exponent = 16.0
    look = Look("slopes to 1/65,536", "#8f6408", "#dfb04c", "v")


class AboveOne(Geometric):
    """8·2^(−8·h/H)."""

    first = 8.0
    look = Look("slopes from 4 to 1/32", "#5a6272", "#a9b2be", "X")


class Uniform(PositionMethod):
    """Slopes h/(H + 1)."""

    look = Look("evenly spaced slopes", "#0c7485", "#5ccbdc", "h")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        heads = torch.arange(1, config.num_heads + 1, dtype=torch.float32)
        self.slopes = nn.Buffer(heads / (config.num_heads + 1), persistent=False)

    def bias(self, at: Pass) -> Tensor:
        return self.slopes


class Exponential(PositionMethod):
    """Slopes −ln(1 − Φ(z)) of normal z, so exponentially distributed.

    The lab draws matrices from the seed and their name, with deviation 1/√columns; z is such a matrix [1, H], and is not
    trained.
    """

    look = Look("random slopes", "#4f7a16", "#a5d063", "P")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.normal = nn.Parameter(torch.empty(1, config.num_heads), requires_grad=False)

    def bias(self, at: Pass) -> Tensor:
        z = self.normal[0].double() * math.sqrt(self.config.num_heads)
        return -torch.special.log_ndtr(-z).float()
