"""Every way of telling a decoder where its tokens are, side by side; what their four hooks are, says `hooks.py`.

To add a method, write a class here, name it in `METHODS` and in `config.Method`: nothing else in the lab knows what methods
there are. Shapes as in `attention/spec.py`; E is the width of the model. Read next: `attention.py`.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn.lab.config import ConfigError, Method, ModelConfig, Stretch
from alibi_attn.lab.forgetting import ALiBiFox, Fox
from alibi_attn.lab.hooks import Pass, PositionError, PositionMethod
from alibi_attn.slopes import alibi_slopes, interpolate_slopes

ROTARY_BASE = 10_000.0  # RoFormer, sec. 3.2.2; the sinusoids of Vaswani et al. have the same
T5_BUCKETS = 32
T5_MAX_DISTANCE = 128  # both numbers: Raffel et al. 2020, sec. 2.1
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # its multiples are spread over 0 … 1 as evenly as a sequence can be
YARN_FEW_TURNS, YARN_MANY_TURNS = 1, 32  # α and β of Peng et al. 2023, sec. 3.2, as for LLaMA


def position_method(config: ModelConfig, trained_length: int) -> PositionMethod:
    """The method that the config names, with its parameters, for a model that is trained at `trained_length` tokens."""
    return METHODS[config.method](config, trained_length)


def check_stretch(method: Method, stretch: Stretch) -> None:
    """Refuse a stretch that the method has not.

    Raises:
        ConfigError: says which ones it has.
    """
    allowed = ("none", *METHODS[method].stretches)
    if stretch not in allowed:
        others = [name for name, kind in METHODS.items() if stretch in kind.stretches]
        raise ConfigError(
            f"eval.stretch is {stretch!r} but model.method {method!r} has only {', '.join(allowed)}; {stretch} is for "
            f"{', '.join(others)}"
        )


def check_segments(method: Method) -> None:
    """Refuse attention within documents (data.segments) where positions would count from the start of the row.

    Raises:
        ConfigError: says which methods have it.
    """
    if not METHODS[method].relative:
        others = [name for name, kind in METHODS.items() if kind.relative]
        raise ConfigError(
            f"model.method is {method!r}, whose positions count from the start of a row and not of a document, so it has no "
            f"data.segments; pass one of {', '.join(others)}, or data.segments=false"
        )


class NoPositions(PositionMethod):
    """Nothing at all: a causal decoder can still count its keys (Haviv et al. 2022, arXiv:2203.16634)."""


class Sinusoidal(PositionMethod):
    """Fixed waves: P[p, 2c] = sin(p / 10000^(2c/E)), P[p, 2c + 1] = cos(the same) (Vaswani et al. 2017, sec. 3.5)."""

    relative = False

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.embed_dim = config.embed_dim

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = _angles(positions, self.embed_dim)
        return x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x.dtype)


class Learned(PositionMethod):
    """One learned vector per position of the trained length; there is none beyond (Vaswani et al. 2017, sec. 3.5)."""

    relative = False

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.max_positions: int | None = trained_length
        self.table = nn.Parameter(torch.empty(trained_length, config.embed_dim))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) and (last := int(positions[-1])) >= len(self.table):
            raise PositionError(
                f"position {last + 1} was asked for, but learned positions end at the trained length, {len(self.table)}; "
                "use a shorter text, or another method"
            )
        return x + self.table[positions].to(x.dtype)


class Rotary(PositionMethod):
    """Channel pairs of q and k are turned by p·θ_c, θ_c = 10000^(−2c/D) (Su et al. 2021, RoFormer, sec. 3.2.2, arXiv:2104.09864).

    All D channels are turned, and channel c is paired with c + D/2, as in GPT-NeoX; RoFormer and GPT-J pair neighbors,
    which is the same up to one fixed permutation of the channels.

    Stretched by s = length / trained length (`rotary_frequencies`); "yarn" also multiplies q and k by 0.1·ln s + 1.
    """

    stretches = ("linear", "ntk", "yarn")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.trained_length, self.length = trained_length, trained_length
        self.stretch: Stretch = "none"

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = rotary_frequencies(q.shape[-1], self.trained_length, self.length, self.stretch, q.device)
        angles = positions.float()[:, None] * frequencies
        size = 0.1 * math.log(self.length / self.trained_length) + 1 if self.stretch == "yarn" else 1.0
        cos, sin = (angles.cos() * size).to(q.dtype), (angles.sin() * size).to(q.dtype)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        twin = copy.copy(self)
        twin.stretch, twin.length = stretch, length
        return twin


class T5Bias(PositionMethod):
    """A learned number per head and distance bucket, shared by all layers (Raffel et al. 2020, sec. 2.1, arXiv:1910.10683).

    Causal: 16 buckets for the distances 0 … 15, then 16 that grow geometrically up to 128, the last for all beyond.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.weight = nn.Parameter(torch.empty(config.num_heads, T5_BUCKETS))

    def bias(self, at: Pass) -> Tensor | None:
        return _toeplitz(self.weight[:, t5_bucket(torch.arange(at.key_len, device=self.weight.device))], at.query_len)


class Kerple(PositionMethod):
    """−r₁·ln(1 + r₂·d), r₁ and r₂ above 0 and learned for each head, shared by all layers: KERPLE-log (Chi et al. 2022,
    arXiv:2205.09921).

    Their logarithms are the parameters, so that they stay above 0 (the authors clamp at 0.01). They start spread evenly over
    the ranges that the authors draw them from, 0 … 2 and 0 … 1, alike for every seed.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        middle = torch.arange(config.num_heads) + 0.5
        self.log_r1 = nn.Parameter((2 * middle / config.num_heads).log())
        self.log_r2 = nn.Parameter(
            (middle * GOLDEN_RATIO % 1).log()
        )  # in another order, so that the pairs are spread too

    def bias(self, at: Pass) -> Tensor | None:
        distance = torch.arange(at.key_len, device=self.log_r1.device)
        r1, r2 = self.log_r1.exp()[:, None], self.log_r2.exp()[:, None]
        return _toeplitz(-r1 * torch.log1p(r2 * distance), at.query_len)


class ALiBi(PositionMethod):
    """−m·|i − j|, one fixed slope m per head, no parameters (Press et al. 2022, sec. 3, arXiv:2108.12409).

    Stretched by flatter slopes (`slopes.interpolate_slopes`).
    """

    stretches = ("linear", "ntk")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.trained_length = trained_length
        self.slopes: Tensor
        slopes = torch.tensor(alibi_slopes(config.num_heads), dtype=torch.float32)
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, at: Pass) -> Tensor | None:
        return self.slopes

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        return _with_flatter_slopes(self, self.slopes, stretch, length)


class ALiBiLearned(PositionMethod):
    """ALiBi whose slopes are trained from the published ones on; their logarithms are the parameters, so that they stay above 0.

    Press et al. 2022, sec. 3, tried trainable slopes and found no strong extrapolation. Stretched as ALiBi is.
    """

    stretches = ("linear", "ntk")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.fixed = ALiBi(config, trained_length)
        self.log_slopes = nn.Parameter(self.fixed.slopes.log())

    def bias(self, at: Pass) -> Tensor | None:
        return self.log_slopes.exp()

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        return _with_flatter_slopes(self.fixed, self.log_slopes.detach().exp(), stretch, length)


class ALiBiHalf(PositionMethod):
    """The published slopes of H/2 heads, and H/2 heads without any position: NAPE (Vasylenko et al. 2025, arXiv:2506.16640).

    Of an odd number of heads the larger half has slopes. Stretched as ALiBi is; slopes of 0 stay 0.
    """

    stretches = ("linear", "ntk")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.fixed = ALiBi(config, trained_length)
        sloped = (config.num_heads + 1) // 2
        slopes = torch.tensor(alibi_slopes(sloped), dtype=torch.float32)
        self.fixed.slopes = F.pad(slopes, (0, config.num_heads - sloped))

    def bias(self, at: Pass) -> Tensor | None:
        return self.fixed.bias(at)

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        return self.fixed.stretched(stretch, length)


METHODS: dict[Method, type[PositionMethod]] = {
    "none": NoPositions,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5Bias,
    "alibi": ALiBi,
    "alibi-learned": ALiBiLearned,
    "alibi-half": ALiBiHalf,
    "kerple": Kerple,
    "fox": Fox,
    "alibi-fox": ALiBiFox,
}


def rotary_frequencies(
    head_dim: int, trained_length: int, length: int, stretch: Stretch, device: torch.device | None = None
) -> Tensor:
    """θ_c, the angle per token of each channel pair, [D/2] fp32; with s = length / trained_length and θ_c = 10000^(−2c/D):

        "linear":  θ_c / s                       position interpolation (Chen et al. 2023, arXiv:2306.15595)
        "ntk":     θ_c with the base 10000·s^(D/(D−2)): the fastest pair unchanged, the slowest divided by s
        "yarn":    (1 − γ)·θ_c/s + γ·θ_c         γ rises from 0 to 1 between 1 and 32 turns in the trained length, r = L·θ_c/2π
                                                 (Peng et al. 2023, sec. 3.2, arXiv:2309.00071)

    The released code of YaRN lets γ rise linearly in the channel instead of r; this is the paper's formula.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = ROTARY_BASE ** (-pairs / head_dim)
    s = length / trained_length
    if stretch == "linear":
        return frequencies / s
    if stretch == "ntk":
        return frequencies * s ** (-pairs / max(head_dim - 2, 1))
    if stretch == "yarn":
        turns = trained_length * frequencies / (2 * math.pi)
        kept = ((turns - YARN_FEW_TURNS) / (YARN_MANY_TURNS - YARN_FEW_TURNS)).clamp(0, 1)
        return (1 - kept) * frequencies / s + kept * frequencies
    return frequencies


def t5_bucket(distance: Tensor) -> Tensor:
    """The bucket, 0 … 31, of each distance i − j ≥ 0."""
    exact = T5_BUCKETS // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(T5_MAX_DISTANCE / exact)
    beyond = exact + (growth * (T5_BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, beyond.clamp(max=T5_BUCKETS - 1))


def _with_flatter_slopes(method: ALiBi, slopes: Tensor, stretch: Stretch, length: int) -> ALiBi:
    assert stretch in ("linear", "ntk")  # `check_stretch` has been asked
    flatter = interpolate_slopes(slopes.tolist(), method.trained_length, length, method=stretch)
    twin = copy.deepcopy(method)
    twin.slopes = torch.tensor(flatter, dtype=torch.float32, device=slopes.device)
    return twin


def _toeplitz(by_distance: Tensor, query_len: int) -> Tensor:
    """A bias per distance [H, S] as a causal bias [H, T, S]: row i holds by_distance[i − j], and −inf to the right of i."""
    future = by_distance.new_full((len(by_distance), query_len - 1), -math.inf)
    last_row_first = torch.cat([by_distance.flip(1), future], dim=1).unfold(1, by_distance.shape[1], 1)
    return last_row_first.flip(1)


def _angles(positions: Tensor, channels: int) -> Tensor:
    """p·10000^(−2c/channels), [T, channels/2] fp32."""
    pairs = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32)
    return positions.float()[:, None] * ROTARY_BASE ** (-pairs / channels)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
