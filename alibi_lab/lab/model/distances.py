"""Position methods that add a number per distance to the scores, independent of the text.

d = i − j ≥ 0 is the distance of a key from its query, L the trained length, H the number of heads. The hook `bias` returns a
table [H, S] by distance, except for FIRE, which also depends on i and returns [H, T, S]. Next: `rotary.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import ByDistance, Pass, PositionMethod, published_slopes

T5_BUCKETS = 32
T5_MAX_DISTANCE = 128  # both numbers: Raffel et al. 2020, sec. 2.1
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, are evenly spread
SANDWICH_CHANNELS = 128
BF16_BLIND = 92.18  # nats: −ln 2^−133, the weight that is zero in bfloat16
TISA_CENTERS = (0.0, 1.0, 4.0, 16.0, 64.0)
FIRE_WIDTH, FIRE_ROWS = 32, 256


class T5Bias(PositionMethod):
    """A learned number per head and distance bucket, shared by all layers (Raffel et al. 2020, sec. 2.1, arXiv:1910.10683).

    Causal: 16 buckets for the distances 0 … 15, then 16 that grow geometrically up to 128, the last for all beyond.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.weight = nn.Parameter(torch.empty(config.num_heads, T5_BUCKETS))

    def bias(self, at: Pass) -> ByDistance:
        return ByDistance(self.weight[:, t5_bucket(torch.arange(at.key_len, device=self.weight.device))])


class Kerple(PositionMethod):
    """KERPLE-log: −r₁·ln(1 + r₂·d) with positive r₁ and r₂, learned per head and shared by all layers.

    Source: Chi et al. 2022 (arXiv:2205.09921). The parameters are their logarithms, which keeps them positive (the
    authors clamp at 0.01). They start evenly spread over the ranges from which the authors draw them, 0 … 2 and 0 … 1,
    equal for every seed.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        middle = torch.arange(config.num_heads) + 0.5
        self.log_r1 = nn.Parameter((2 * middle / config.num_heads).log())
        # In another order, so that the pairs are spread too.
        self.log_r2 = nn.Parameter((middle * GOLDEN_RATIO % 1).log())

    def bias(self, at: Pass) -> ByDistance:
        r1, r2 = self.log_r1.exp()[:, None], self.log_r2.exp()[:, None]
        return ByDistance(-r1 * torch.log1p(r2 * _distances(at, r1)))


class ALiBiLog(PositionMethod):
    """−m·ln(1 + d) with the published slopes.

    Of four remedies for heads that lose distant keys, this one helped retrieval most (Schröder et al. 2026,
    arXiv:2608.03994).
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.slopes = published_slopes(config.num_heads)

    def bias(self, at: Pass) -> ByDistance:
        return ByDistance(-self.slopes[:, None] * torch.log1p(_distances(at, self.slopes)))


class ALiBiClamp(ALiBiLog):
    """max(−m·d, −92.18), because a weight below that is zero in bfloat16 (the same authors' first remedy)."""

    def bias(self, at: Pass) -> ByDistance:
        linear = -self.slopes[:, None] * _distances(at, self.slopes)
        return ByDistance(linear.clamp(min=-BF16_BLIND))


class Sandwich(PositionMethod):
    """(Σ_c cos(d / 10000^(2c/128)) − 64) / (8h/H) for head h = 1 … H and c = 1 … 64, without parameters.

    The sum is the inner product of two sinusoidal embeddings of 128 channels; 64 is its value at d = 0 (Chi et al.
    2023, arXiv:2212.10356).
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        compression = 8 * torch.arange(1, config.num_heads + 1, dtype=torch.float32) / config.num_heads
        self.compression = nn.Buffer(compression, persistent=False)

    def bias(self, at: Pass) -> ByDistance:
        distance = _distances(at, self.compression)
        channel = torch.arange(1, SANDWICH_CHANNELS // 2 + 1, device=distance.device, dtype=torch.float32)
        waves = (distance[:, None] / 10_000 ** (2 * channel / SANDWICH_CHANNELS)).cos() - 1
        return ByDistance(waves.sum(-1) / self.compression[:, None])


class Tisa(PositionMethod):
    """Σ_s a_s·exp(−|b_s|·(d − c_s)²), s = 1 … 5, with a, b and c learned per layer and head.

    Translation-invariant self-attention (Wennberg and Henter 2021, arXiv:2106.01950), which the paper cites as related.
    Centers c start at the distances 0, 1, 4, 16 and 64, with standard deviations 1, 1, 4, 16 and 64 and weights a of
    0.1.
    """

    per_layer = True

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.shape = (config.num_layers, config.num_heads, len(TISA_CENTERS))
        centers = torch.tensor(TISA_CENTERS).expand(self.shape).flatten()
        self.amplitude = nn.Parameter(torch.full((centers.numel(),), 0.1))
        self.sharpness = nn.Parameter(1 / (2 * centers.clamp(min=1.0) ** 2))
        self.center = nn.Parameter(centers.clone())

    def bias(self, at: Pass) -> ByDistance:
        parts = (self.amplitude, self.sharpness, self.center)
        a, b, c = (part.view(self.shape)[at.layer.index][..., None] for part in parts)
        return ByDistance((a * torch.exp(-b.abs() * (_distances(at, a) - c) ** 2)).sum(1))


class Fire(PositionMethod):
    """FIRE: f(ψ(d) / ψ(max(i, θ))) with ψ(x) = ln(1 + |c|·x) and a small network f, shared by all layers.

    f has one hidden layer of 32 (ReLU) and one output per head (Li et al. 2024, arXiv:2310.04418). c starts at 0.1 and
    the threshold θ at L/4, like the authors' 512 for L = 2,048. i counts from the start of the row, so a row cannot
    hold several documents.
    """

    relative = False

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.c = nn.Parameter(torch.tensor([0.1]))
        self.threshold = nn.Parameter(torch.tensor([max(1.0, trained_length / 4)]))
        self.hidden_weight = nn.Parameter(torch.empty(FIRE_WIDTH, 1))
        # Equal for every seed, with kinks spread over 0 … 1.
        self.hidden_bias = nn.Parameter(torch.linspace(-0.5, 0.5, FIRE_WIDTH))
        self.head_weight = nn.Parameter(torch.empty(config.num_heads, FIRE_WIDTH))
        self.head_bias = nn.Parameter(torch.zeros(config.num_heads))

    def bias(self, at: Pass) -> Tensor | None:
        key = torch.arange(at.key_len, device=self.c.device)
        queries = key[at.key_len - at.query_len :, None].split(FIRE_ROWS)  # because every score needs 32 numbers
        return torch.cat([self._rows(query, key) for query in queries], dim=1)

    def _rows(self, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        with torch.autocast(self.c.device.type, enabled=False):
            far = torch.log1p(self.c.abs() * torch.maximum(query.float(), self.threshold.abs()))
            near = torch.log1p(self.c.abs() * distance.clamp(min=0).float())
            hidden = F.linear((near / far)[..., None], self.hidden_weight, self.hidden_bias).relu()
            bias = F.linear(hidden, self.head_weight, self.head_bias)
            return bias.permute(2, 0, 1).masked_fill(distance < 0, -math.inf)


def t5_bucket(distance: Tensor) -> Tensor:
    """The bucket, 0 … 31, of each distance i − j ≥ 0."""
    exact = T5_BUCKETS // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(T5_MAX_DISTANCE / exact)
    beyond = exact + (growth * (T5_BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, beyond.clamp(max=T5_BUCKETS - 1))


def _distances(at: Pass, like: Tensor) -> Tensor:
    """0 … S − 1 in fp32, on the device of `like`."""
    return torch.arange(at.key_len, dtype=torch.float32, device=like.device)
