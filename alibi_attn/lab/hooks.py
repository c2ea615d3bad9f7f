"""The four hooks of a position method, and what is handed to them.

    add(x, positions)             x [B, T, E] gets the embedding of its positions, once, before the first layer
    rotate(q, k, positions, at)   q, k [B, H, T, D] are turned, in every layer, before the keys are cached
    bias(at)                      what is added to the scaled scores: a full bias [H, T, S], −inf where the query may not look;
                                  where only the distance counts, a `ByDistance`; where it is linear in that, only its slopes
                                  [H]; where every key has a number of its own, computed from the text, a `ContentBias`; forget
                                  gates, `ForgetGates`; a layer that sees only the last tokens, `Windowed`; or None
    stretched(stretch, length)    the method for texts of `length` tokens, more than it was trained at, without training

`positions` [T] are absolute and start at 0; the queries are the last T of the S keys. Shapes as in `attention/spec.py`; E is
the width of the model. Read next: `positions.py`.
"""

import dataclasses
from typing import TypeAlias

import torch
from torch import Tensor, nn

from alibi_attn.lab.config import ConfigError, ModelConfig, Stretch
from alibi_attn.slopes import alibi_slopes


class PositionError(ValueError):
    """A position that the method has no meaning for, or a hook that asks for what it is not given."""


@dataclasses.dataclass(frozen=True)
class ContentBias:
    """A number for every key, added to all scores that the key takes part in: the log of a forget gate, say.

    Softmax does not see what is added to all keys alike, so that only differences between keys count.

    Args:
        key_bias: [B, H, T], fp32 or fp64, of the T tokens of this pass; −inf hides a key. Those of earlier tokens stay with the
            cached keys, and come back as `LayerInput.earlier`.
        slopes: [H], of a bias that is linear in the distance and is added as well.
    """

    key_bias: Tensor
    slopes: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ForgetGates:
    """What every token keeps of all before it: score_ij gets Σ_{l=j+1..i} log_fgate_l (`forgetting_attention`).

    Args:
        log_fgate: [B, H, T] fp32, at most 0, of the T tokens of this pass. Those of earlier tokens stay with the cached keys.
        slopes: [H], of a bias that is linear in the distance and is added as well.
    """

    log_fgate: Tensor
    slopes: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ByDistance:
    """A number for every head and distance, added to the scores: the same for every text (`toeplitz_attention`).

    Args:
        table: [H, S], floating: those of the distances 0 … S − 1.
    """

    table: Tensor


@dataclasses.dataclass(frozen=True)
class Windowed:
    """A layer in which every token sees the last `window` tokens, itself included, and nothing is added to the scores."""

    window: int


Bias: TypeAlias = Tensor | ByDistance | ContentBias | ForgetGates | Windowed | None


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """What one layer sees.

    Args:
        x: [B, T, E], the normalized input of its attention, of which q, k and v are made.
        index: which layer it is, from 0.
        earlier: [B, H, S − T], the `key_bias` of the cached tokens, in order; None where there are none.
    """

    x: Tensor
    index: int
    earlier: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Pass:
    """What `bias` and `rotate` are asked for: `query_len` T and `key_len` S.

    Args:
        progress: the share of the training's steps that are done, 0 … 1; 1 after the training.
        input: of the layer that asks; see `layer`. `rotate` always has one.
    """

    query_len: int
    key_len: int
    progress: float = 1.0
    input: LayerInput | None = None

    @property
    def layer(self) -> LayerInput:
        """The layer that asks; only methods that say `per_layer` have one.

        Raises:
            PositionError: the method is asked once for all layers.
        """
        if self.input is None:
            raise PositionError(
                "this bias is asked once for all layers; say per_layer = True to be asked by each of them"
            )
        return self.input


class PositionMethod(nn.Module):
    """The four hooks of a method that does nothing, and what a method can do; others overwrite what they need.

    A parameter [E, H] of its own for every layer is one parameter [layers, E, H]: `bias` is told the layer's index. Vectors
    stay as the method has made them; all other parameters are drawn from the seed and their name (`lab/model.py`).

    Args:
        max_positions: how many positions there are; None = no limit.
        relative: only the distance of two tokens matters, so that documents in one row need not know where they stand.
        per_layer: `bias` is asked by every layer, with what it sees; or once for all of them, which costs less.
        stretches: which stretches it has, besides "none".
    """

    max_positions: int | None = None
    relative: bool = True
    per_layer: bool = False
    stretches: tuple[Stretch, ...] = ()

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, E] with the embedding of its positions [T]."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """q and k [B, H, T, D], turned."""
        return q, k

    def bias(self, at: Pass) -> Bias:
        """What is added to the scaled scores."""
        return None

    def stretched(self, stretch: Stretch, length: int) -> "PositionMethod":
        """The method for texts of `length` tokens.

        Raises:
            ConfigError: it has no such stretch.
        """
        raise ConfigError(
            f"eval.stretch is {stretch!r} but {type(self).__name__} positions have none; pass eval.stretch=none"
        )


def published_slopes(config: ModelConfig) -> Tensor:
    """[H] fp32, of Press et al. 2022, sec. 3: a module keeps them, and they are not saved."""
    return nn.Buffer(torch.tensor(alibi_slopes(config.num_heads), dtype=torch.float32), persistent=False)
