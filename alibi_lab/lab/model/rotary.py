"""Rotary positions, alone or alternating with layers without positions.

Shapes as in `attention/call/spec.py`; L is the trained length. Next: `attention.py`.
"""

import copy
import math

import torch
from torch import Tensor

from alibi_lab.lab.config import Stretch
from alibi_lab.lab.model.position_method import Bias, Pass, PositionMethod, Windowed

ROTARY_BASE = 10_000.0  # RoFormer, sec. 3.2.2
YARN_FEW_TURNS, YARN_MANY_TURNS = 1, 32  # α and β of Peng et al. 2023, sec. 3.2, as for LLaMA
DROPE_SHARE = 0.88  # of the training with rotary positions


class Rotary(PositionMethod):
    """Rotates channel pairs of q and k by p·θ_c, θ_c = 10000^(−2c/D) (Su et al. 2021, RoFormer, sec. 3.2.2, arXiv:2104.09864).

    All D channels are rotated, and channel c is paired with c + D/2, as in GPT-NeoX; RoFormer and GPT-J pair neighbors,
    which is equivalent up to a fixed permutation of the channels.

    Stretched by s = length / trained length (`rotary_frequencies`); "yarn" also multiplies q and k by 0.1·ln s + 1.
    """

    stretches: tuple[Stretch, ...] = ("linear", "ntk", "yarn")
    stretching: tuple[Stretch, int] = ("none", 1)  # and the length

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        stretch, length = self.stretching
        frequencies = rotary_frequencies(q.shape[-1], self.trained_length, length, stretch, q.device)
        angles = positions.float()[:, None] * frequencies
        size = 0.1 * math.log(length / self.trained_length) + 1 if stretch == "yarn" else 1.0
        cos, sin = (angles.cos() * size).to(q.dtype), (angles.sin() * size).to(q.dtype)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        twin = copy.copy(self)
        twin.stretching = stretch, length
        return twin


class NopeWindow(Rotary):
    """Layers with rotary positions and a window of L/4 tokens alternate with layers without positions or a window.

    So no position is out of range (Puvvada et al. 2025, SWAN-GPT, arXiv:2504.08719; Yang et al. 2025,
    arXiv:2501.18795). The first layer has the window. The published models have three such layers per layer without
    positions, and sharpen scores with the length at test time; neither is done here.
    """

    per_layer = True
    stretches = ()

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, positions, at) if _is_near(at) else (q, k)

    def bias(self, at: Pass) -> Bias:
        return Windowed(max(1, self.trained_length // 4)) if _is_near(at) else None


class DroPE(Rotary):
    """Rotary positions for the first 88 % of the training, and none after that (Gelberg et al. 2025, DroPE, arXiv:2512.12167).

    The authors drop them from a finished model and train it a little more; here both are one schedule.
    """

    stretches = ()

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, positions, at) if at.progress < DROPE_SHARE else (q, k)


def rotary_frequencies(
    head_dim: int, trained_length: int, length: int, stretch: Stretch, device: torch.device | None = None
) -> Tensor:
    """θ_c, the angle per token of each channel pair, [D/2] fp32; with s = length / trained_length and θ_c = 10000^(−2c/D):

        "linear":  θ_c / s                       position interpolation (Chen et al. 2023, arXiv:2306.15595)
        "ntk":     θ_c with the base 10000·s^(D/(D−2)): the fastest pair unchanged, the slowest divided by s
        "yarn":    (1 − γ)·θ_c/s + γ·θ_c         γ rises from 0 to 1 between 1 and 32 turns in the trained length, r = L·θ_c/2π
                                                 (Peng et al. 2023, sec. 3.2, arXiv:2309.00071)

    In YaRN's released code γ rises linearly in the channel instead of r; this is the paper's formula.
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
        share = ((turns - YARN_FEW_TURNS) / (YARN_MANY_TURNS - YARN_FEW_TURNS)).clamp(0, 1)
        return (1 - share) * frequencies / s + share * frequencies
    return frequencies


def _is_near(at: Pass) -> bool:
    return at.layer.index % 2 == 0


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
