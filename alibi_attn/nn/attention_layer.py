"""The attention of a layer between its linear layers: all that checks of inputs and static caches need of `ALiBiAttention`."""

from typing import Any

from torch import Tensor, nn

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.call.part_options import Window
from alibi_attn.attention.call.spec import index_of
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.nn.gates import ForgetGates
from alibi_attn.nn.positional import HeadSlopes


class AttentionLayer(nn.Module):
    """`ALiBiAttention` between its linear layers. The attributes are its arguments, or modules that it creates from them."""

    causal: bool
    dropout_p: float
    embed_dim: int
    gate_proj: ForgetGates | None
    kv_dim: int | None
    q_proj: nn.Linear
    sinks: int
    slopes: HeadSlopes
    window: tuple[int, ...] | int | None

    # The functions that compute attention; `distributed.context_parallel` replaces them on an instance.
    attend = staticmethod(alibi_attention)
    attend_gated = staticmethod(forgetting_attention)

    @property
    def sinks_of_window(self) -> int:
        """The first keys that a cache must keep; 0 without a window, which alone hides them."""
        return 0 if self.window is None else self.sinks

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, gates: Tensor | None = None, *, heads: list[int] | None = None,
        **given: Tensor | int | None,
    ) -> Tensor:  # fmt: skip
        """Attention, [B, H, T, D], of all heads or some, with the given options of `alibi_attention`."""
        slopes, window = self._of_heads(heads)
        options: Any = {"window": window, "dropout_p": self.dropout_p if self.training else 0.0}
        options |= {name: value for name, value in given.items() if value is not None}
        if gates is not None:
            return self.attend_gated(query, key, value, gates, slopes, **options)
        if self.sinks_of_window:
            options["sinks"] = self.sinks
        return self.attend(query, key, value, slopes, causal=self.causal, **options)

    def _of_heads(self, heads: list[int] | None) -> tuple[Tensor, Window | None]:
        """(slopes, window) of some heads; None = all."""
        slopes, window = self.slopes.values, self.window
        if heads is None:
            return slopes, window
        return slopes[index_of(heads)], [window[head] for head in heads] if isinstance(window, tuple) else window
