"""Every way of telling a decoder where its tokens are, side by side.

A method has three hooks, and most use one:

    add(x, positions)             x [B, T, E] gets the embedding of its positions, once, before the first layer
    rotate(q, k, positions)       q, k [B, H, T, D] are turned, in every layer, before the keys are cached
    bias(query_len, key_len)      what is added to the scaled scores, in every layer: a full bias [H, T, S], −inf where the
                                  query may not look, or, where it is linear in the distance, only its slopes [H], or None

`positions` [T] are absolute and start at 0; the queries are the last T of the S keys. To add a method, write a class
here, name it in `METHODS` and in `config.Method`: nothing else in the lab knows what methods there are.
Shapes as in `attention/spec.py`; E is the width of the model. Read next: `model.py`.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn.attention.api import alibi_attention
from alibi_attn.lab.config import Method, ModelConfig
from alibi_attn.slopes import alibi_slopes

ROTARY_BASE = 10_000.0  # RoFormer, sec. 3.2.2; the sinusoids of Vaswani et al. have the same
T5_BUCKETS = 32
T5_MAX_DISTANCE = 128  # both numbers: Raffel et al. 2020, sec. 2.1


class PositionError(ValueError):
    """A position that the method has no meaning for."""


class PositionMethod(Protocol):
    """The three hooks, and how many positions there are (None: no limit)."""

    max_positions: int | None

    def add(self, x: Tensor, positions: Tensor) -> Tensor: ...
    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...
    def bias(self, query_len: int, key_len: int) -> Tensor | None: ...


def position_method(config: ModelConfig, trained_length: int) -> PositionMethod:
    """The method that the config names, with its parameters, for a model that is trained at `trained_length` tokens."""
    return METHODS[config.method](config, trained_length)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Causal attention [B, H, T, D] with what a method's `bias` returned; the queries are the last T of the S keys."""
    if bias is not None and bias.ndim == 1:
        return alibi_attention(q, k, v, bias)
    query_len, key_len = q.shape[-2], k.shape[-2]
    if bias is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))
    if query_len == key_len:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    keys = torch.arange(key_len, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys <= keys[key_len - query_len :, None])


def _adds_nothing(self: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    return x


def _rotates_nothing(self: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _has_no_bias(self: nn.Module, query_len: int, key_len: int) -> Tensor | None:
    return None


class NoPositions(nn.Module):
    """Nothing at all: a causal decoder can still count its keys (Haviv et al. 2022, arXiv:2203.16634)."""

    max_positions: int | None = None
    add = _adds_nothing
    rotate = _rotates_nothing
    bias = _has_no_bias

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()


class Sinusoidal(nn.Module):
    """Fixed waves: P[p, 2c] = sin(p / 10000^(2c/E)), P[p, 2c + 1] = cos(the same) (Vaswani et al. 2017, sec. 3.5)."""

    max_positions: int | None = None
    rotate = _rotates_nothing
    bias = _has_no_bias

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()
        self.embed_dim = config.embed_dim

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = _angles(positions, self.embed_dim)
        return x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x.dtype)


class Learned(nn.Module):
    """One learned vector per position of the trained length; there is none beyond (Vaswani et al. 2017, sec. 3.5)."""

    rotate = _rotates_nothing
    bias = _has_no_bias

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()
        self.max_positions: int | None = trained_length
        self.table = nn.Parameter(torch.empty(trained_length, config.embed_dim))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) and (last := int(positions[-1])) >= len(self.table):
            raise PositionError(
                f"position {last + 1} was asked for, but learned positions end at the trained length, {len(self.table)}; "
                "use a shorter text, or another method"
            )
        return x + self.table[positions].to(x.dtype)


class Rotary(nn.Module):
    """Channel pairs of q and k are turned by p·10000^(−2c/D) (Su et al. 2021, RoFormer, sec. 3.2.2, arXiv:2104.09864).

    All D channels are turned, and channel c is paired with c + D/2, as in GPT-NeoX; RoFormer and GPT-J pair neighbors,
    which is the same up to one fixed permutation of the channels.
    """

    max_positions: int | None = None
    add = _adds_nothing
    bias = _has_no_bias

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = _angles(positions, q.shape[-1])
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return _turn(q, cos, sin), _turn(k, cos, sin)


class T5Bias(nn.Module):
    """A learned number per head and distance bucket, shared by all layers (Raffel et al. 2020, sec. 2.1, arXiv:1910.10683).

    Causal: 16 buckets for the distances 0 … 15, then 16 that grow geometrically up to 128, the last for all beyond.
    """

    max_positions: int | None = None
    add = _adds_nothing
    rotate = _rotates_nothing

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_heads, T5_BUCKETS))

    def bias(self, query_len: int, key_len: int) -> Tensor | None:
        return _toeplitz(self.weight[:, t5_bucket(torch.arange(key_len, device=self.weight.device))], query_len)


class ALiBi(nn.Module):
    """−m·|i − j|, one fixed slope m per head, no parameters (Press et al. 2022, sec. 3, arXiv:2108.12409)."""

    max_positions: int | None = None
    add = _adds_nothing
    rotate = _rotates_nothing

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()
        self.slopes: Tensor
        slopes = torch.tensor(alibi_slopes(config.num_heads), dtype=torch.float32)
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, query_len: int, key_len: int) -> Tensor | None:
        return self.slopes


METHODS: dict[Method, Callable[[ModelConfig, int], PositionMethod]] = {
    "none": NoPositions,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5Bias,
    "alibi": ALiBi,
}


def t5_bucket(distance: Tensor) -> Tensor:
    """The bucket, 0 … 31, of each distance i − j ≥ 0."""
    exact = T5_BUCKETS // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(T5_MAX_DISTANCE / exact)
    beyond = exact + (growth * (T5_BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, beyond.clamp(max=T5_BUCKETS - 1))


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
