"""The built-in position methods; `position_method.py` documents their hooks.

To add a method, write its class in a file of this folder and give it a row in `alibi_lab/position_methods.py`; no other file
lists methods: recipes name those that they compare. A method in your own file needs no row (`method_checks.py`).
Shapes as in `attention/call/spec.py`; E is the width of the model. Next: `distances.py`.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn import interpolate_slopes
from alibi_lab.lab.config import ConfigError, Method, ModelConfig, Stretch
from alibi_lab.lab.model.method_checks import imported_method
from alibi_lab.lab.model.position_method import ForgetGates, Pass, PositionError, PositionMethod, published_slopes
from alibi_lab.position_methods import LOOKS

WAVE_BASE = 10_000.0  # Vaswani et al. 2017, sec. 3.5


def method_class(method: Method) -> type[PositionMethod]:
    """The class of a built-in method, or of an import path.

    Raises:
        ConfigError: the path names no position method.
    """
    return METHODS[method] if method in METHODS else imported_method(method)


def stretches_of(method: Method) -> tuple[Stretch, ...]:
    """The stretches that a method supports; every method supports "none"."""
    return ("none", *method_class(method).stretches)


def check_stretch(method: Method, stretch: Stretch) -> None:
    """Check that the method supports a stretch.

    Raises:
        ConfigError: it does not; the message lists the supported ones.
    """
    allowed = stretches_of(method)
    if stretch not in allowed:
        others = [name for name, kind in METHODS.items() if stretch in kind.stretches]
        raise ConfigError(
            f"eval.stretch is {stretch!r} but model.method {method!r} has only {', '.join(allowed)}; {stretch} is for "
            f"{', '.join(others)}"
        )


def check_segments(method: Method) -> None:
    """Check that the method supports attention within documents (data.segments).

    Raises:
        ConfigError: its positions count from the start of the row; the message lists the methods that support it.
    """
    if not method_class(method).relative:
        others = [name for name, kind in METHODS.items() if kind.relative]
        raise ConfigError(
            f"model.method is {method!r}, whose positions count from the start of a row instead of a document, so it "
            f"does not support data.segments; pass one of {', '.join(others)}, or data.segments=false"
        )


class NoPositions(PositionMethod):
    """No positions: a causal decoder can still count its keys (Haviv et al. 2022, arXiv:2203.16634)."""


class Sinusoidal(PositionMethod):
    """Fixed waves: P[p, 2c] = sin(p / 10000^(2c/E)), P[p, 2c + 1] = cos(the same) (Vaswani et al. 2017, sec. 3.5)."""

    relative = False

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        channels = torch.arange(0, self.config.embed_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions.float()[:, None] * WAVE_BASE ** (-channels / self.config.embed_dim)
        return x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x.dtype)


class Learned(PositionMethod):
    """One learned vector per position of the trained length, and none beyond (Vaswani et al. 2017, sec. 3.5)."""

    relative = False

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.max_positions: int | None = trained_length
        self.table = nn.Parameter(torch.empty(trained_length, config.embed_dim))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) and (last := int(positions[-1])) >= len(self.table):
            raise PositionError(
                f"position {last + 1} does not exist: learned positions end at the trained length, {len(self.table)}; "
                "use a shorter text, or another method"
            )
        return x + self.table[positions].to(x.dtype)


class ALiBi(PositionMethod):
    """−m·|i − j|, one fixed slope m per head, no parameters (Press et al. 2022, sec. 3, arXiv:2108.12409).

    Stretched by flatter slopes (`slopes.interpolate_slopes`).
    """

    stretches = ("linear", "ntk")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.slopes = published_slopes(config.num_heads)

    def bias(self, at: Pass) -> Tensor:
        return self.slopes

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        assert stretch in ("linear", "ntk")  # see `check_stretch`
        slopes = self.bias(Pass(length, length)).detach()
        flatter = interpolate_slopes(slopes.tolist(), self.trained_length, length, method=stretch)
        twin = ALiBi(self.config, self.trained_length)
        twin.slopes = torch.tensor(flatter, dtype=torch.float32, device=slopes.device)
        return twin


class ALiBiLearned(ALiBi):
    """ALiBi with slopes trained from the published ones; the parameters are their logarithms, which keeps them positive.

    Press et al. 2022, sec. 3, tried trainable slopes and found no strong extrapolation.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.log_slopes = nn.Parameter(self.slopes.log())

    def bias(self, at: Pass) -> Tensor:
        return self.log_slopes.exp()


class ALiBiHalf(ALiBi):
    """The published slopes of H/2 heads, and H/2 heads without position: NAPE (Vasylenko et al. 2025, arXiv:2506.16640).

    For an odd number of heads the larger half has slopes. Stretching keeps slopes of 0.
    """

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        sloped = (config.num_heads + 1) // 2
        self.slopes = F.pad(published_slopes(sloped), (0, config.num_heads - sloped))


class Fox(PositionMethod):
    """A forget gate per layer, head and token, sigmoid(w·x + b), multiplied from key to query (Lin et al. 2025).

    The score of key j gets Σ ln f_l over l = j + 1 … i. Gates are fp32. b starts at 0, as in the authors' code, so each
    gate keeps about one half at first. The short convolutions, output gates and QK-norm of their larger block are not
    included. Source: arXiv:2503.02130, eq. 9 to 12.
    """

    per_layer = True

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.gate_weight = nn.Parameter(torch.empty(config.num_layers, config.num_heads, config.embed_dim))
        self.gate_bias = nn.Parameter(torch.zeros(config.num_layers * config.num_heads))

    def bias(self, at: Pass) -> ForgetGates:
        x, index = at.layer.x, at.layer.index
        with torch.autocast(x.device.type, enabled=False):
            bias = self.gate_bias.float().view(self.gate_weight.shape[:2])[index]
            logits = F.linear(x.float(), self.gate_weight[index].float(), bias)
        return ForgetGates(F.logsigmoid(logits).transpose(1, 2))


class ALiBiFox(Fox):
    """Gates and the published slopes together."""

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.slopes = published_slopes(config.num_heads)

    def bias(self, at: Pass) -> ForgetGates:
        return dataclasses.replace(super().bias(at), slopes=self.slopes)


METHODS: dict[Method, type[PositionMethod]] = {
    name: imported_method(f"alibi_lab.lab.model.{look.defined}") for name, look in LOOKS.items()
}
