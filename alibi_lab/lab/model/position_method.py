"""The interface of a position method: its hooks, their arguments and their results.

    add(x, positions)             adds the embedding of the positions to x [B, T, E], once, before the first layer
    rotate(q, k, positions, at)   rotates q, k [B, H, T, D] in every layer, before the keys are cached
    bias(at)                      the bias of the scaled scores: slopes [H] if linear in the distance, `ByDistance`
                                  for any other function of the distance, `ContentBias` for a number per key computed from the
                                  text, `ForgetGates`, `Windowed` for a layer that sees only the last tokens, a full bias
                                  [H, T, S] with −inf for hidden keys, or None
    attend(q, k, v, at, default)  the attention of a layer, [B, H, T, D]
    stretched(stretch, length)    the method for texts of `length` tokens, beyond the trained length, without training
    curves(model, corpus, config) a class method, of tests only: additional curves for the record of a trained model of any
                                  method (`evaluation/evaluate.py:own_curves`)

`positions` [T] are absolute and start at 0; the queries are the last T of the S keys. Shapes as in `attention/call/spec.py`; E is
the width of the model. Next: `positions.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist

from alibi_attn import alibi_slopes
from alibi_lab.lab.config import ConfigError, ModelConfig, Stretch
from alibi_lab.position_methods import Look

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class PositionError(ValueError):
    """A position the method does not define, or a hook that uses an input it does not have."""


@dataclasses.dataclass(frozen=True)
class ContentBias:
    """A number per key, added to all scores of that key. Only differences between keys matter, because softmax cancels the rest.

    Args:
        key_bias: [B, H, T], fp32 or fp64, for the T tokens of this pass; −inf hides a key. The numbers of earlier tokens are
            stored with the cached keys and are available as `LayerInput.earlier`.
        slopes: [H], for an additional bias that is linear in the distance.
    """

    key_bias: Tensor
    slopes: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ForgetGates:
    """Forget gates: score_ij gets Σ_{l=j+1..i} log_fgate_l (`forgetting_attention`).

    Args:
        log_fgate: [B, H, T] fp32, at most 0, for the T tokens of this pass. Earlier ones are stored with the cached keys.
        slopes: [H], for an additional bias that is linear in the distance.
    """

    log_fgate: Tensor
    slopes: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ByDistance:
    """A number per head and distance, added to the scores (`toeplitz_attention`).

    Args:
        table: [H, S], floating, for the distances 0 … S − 1.
    """

    table: Tensor


@dataclasses.dataclass(frozen=True)
class Windowed:
    """A layer in which every token sees the last `window` tokens, including itself, without a bias."""

    window: int


Bias: TypeAlias = Tensor | ByDistance | ContentBias | ForgetGates | Windowed | None


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """The input of one layer.

    Args:
        x: [B, T, E], the normalized input of its attention, from which q, k and v are computed.
        index: of the layer, from 0.
        block: the layer; `block.q`, `.k`, `.v` are its projections.
        earlier: [B, H, S − T], the `key_bias` of the cached tokens, in order; None without a cache.
    """

    x: Tensor
    index: int
    earlier: Tensor | None = None
    block: nn.Module | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """The position of this process's tokens in sequences that several processes share.

    Args:
        group: these processes, in the order of their tokens.
        start: the number of tokens on the processes before this one.
        timeout: of an exchange, in seconds.
    """

    group: dist.ProcessGroup
    start: int
    timeout: float


@dataclasses.dataclass(frozen=True)
class Pass:
    """The arguments of `bias`, `rotate` and `attend`: `query_len` T and `key_len` S.

    Args:
        progress: the finished share of the training's steps, 0 … 1; 1 after training.
        input: of the current layer; see `layer`. `rotate` and `attend` always have one.
        window: the number of keys a query may see, including itself; None = all before it.
        segment_ids: [B, S], the document of every key; a query sees its own document only.
        context: if other processes hold the other tokens of the sequences.
    """

    query_len: int
    key_len: int
    progress: float = 1.0
    input: LayerInput | None = None
    window: int | None = None
    segment_ids: Tensor | None = None
    context: Context | None = None

    @property
    def layer(self) -> LayerInput:
        """The input of the current layer; available with `per_layer = True`.

        Raises:
            PositionError: the bias is computed once for all layers.
        """
        if self.input is None:
            raise PositionError(
                "this bias is computed once for all layers; set per_layer = True to compute it in each layer"
            )
        return self.input

    def distances(self, device: torch.device) -> Tensor:
        """i − j, [T, S]; negative for keys to the right."""
        keys = torch.arange(self.key_len, device=device)
        return keys[self.key_len - self.query_len :, None] - keys

    def visible(self, device: torch.device) -> Tensor:
        """Whether a query may see a key, [B or 1, 1, T, S]: causal, within the window and the document."""
        distance = self.distances(device)
        seen = ((distance >= 0) & (distance < (self.window or self.key_len)))[None, None]
        if self.segment_ids is None:
            return seen
        documents = self.segment_ids
        return seen & (documents[:, None, self.key_len - self.query_len :, None] == documents[:, None, None, :])


class PositionMethod(nn.Module):
    """A method that does nothing; subclasses override the hooks they need and declare what they support.

    Separate parameters [E, H] per layer are one parameter [layers, E, H], indexed by `at.layer.index`. Vectors keep the values
    the method gives them; all other parameters are drawn from the seed and their name (`lab/model/language_model.py`).

    Args:
        max_positions: the number of positions; None = no limit.
        relative: only distances matter, so that several documents may share a row.
        per_layer: `bias` is called in every layer, with its input; otherwise once for all layers, which is cheaper.
        stretches: the supported stretches, in addition to "none".
        segment: texts are read in segments of this many tokens, in training too; each also sees the keys and values of the
            `memory` tokens before it, without gradients. None = whole texts.
        look: the label, colors and marker in reports; built-in methods have a row in `alibi_lab/position_methods.py`.
    """

    max_positions: int | None = None
    relative: bool = True
    per_layer: bool = False
    stretches: tuple[Stretch, ...] = ()
    segment: int | None = None
    memory: int = 0
    look: Look | None = None

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__()
        self.config, self.trained_length = config, trained_length

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, E] with the embedding of its positions [T]."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """q and k [B, H, T, D], rotated."""
        return q, k

    def bias(self, at: Pass) -> Bias:
        """The bias that is added to the scaled scores."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        """The attention of the current layer, [B, H, T, D], for k, v [B, H, S, D], cached ones included.

        Args:
            at: `at.visible(device)` is the mask that an implementation must apply.
            default: the built-in attention with this method's `bias`, the mask and dropout.
        """
        return default(q, k, v)

    def stretched(self, stretch: Stretch, length: int) -> "PositionMethod":
        """The method for texts of `length` tokens.

        Raises:
            ConfigError: it does not support this stretch.
        """
        raise ConfigError(
            f"eval.stretch is {stretch!r} but {type(self).__name__} positions do not support it; pass eval.stretch=none"
        )


class Wrapping(PositionMethod):
    """Another method, unchanged; subclasses replace `attend` to observe or change the attention of a trained model."""

    def __init__(self, method: PositionMethod) -> None:
        super().__init__(method.config, method.trained_length)
        self.method = method
        self.per_layer, self.relative, self.max_positions = method.per_layer, method.relative, method.max_positions
        self.add, self.rotate, self.bias = method.add, method.rotate, method.bias  # type: ignore[method-assign]


def published_slopes(num_heads: int) -> Tensor:
    """The slopes of Press et al. 2022, sec. 3, [H] fp32, as a buffer that is not saved."""
    return nn.Buffer(torch.tensor(alibi_slopes(num_heads), dtype=torch.float32), persistent=False)
