"""ForgettingCache: a cache for `generate` that drops keys once forget gates prove that no later token can need them.

`ALiBiCache` keeps all keys; here each key head keeps its own number of keys. The proof is in `docs/maths.md`, step 12, and the
code in `nn/gated_cache.py`.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from alibi_attn.nn.gated_cache import GatedReachCache


class ForgettingCache(Cache):
    """Pass a new one as `past_key_values` to a Forgetting Transformer with normalized queries and keys (`qk_norm`).

    Logits are those of an `ALiBiCache` within the tolerance, from a part of its memory. It supports left padding, beams and
    chunks. It cannot return to fewer tokens, so assisted generation and prompt lookup need an `ALiBiCache`. Sequences of a
    batch drop keys together, so rows of similar length and padding keep the fewest.

    Args:
        tolerance: the largest share of a later query's softmax mass that is forgotten; None = eps / 32 of the dtype.

    >>> from alibi_attn.hf import ALiBiCausalLMConfig, ALiBiForCausalLM
    >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50)
    >>> gates = dict(forget_gate=True, head_norm_eps=1e-5, slopes=[0.0] * 4)
    >>> model, cache = ALiBiForCausalLM(ALiBiCausalLMConfig(**sizes, **gates)).eval(), ForgettingCache()
    >>> prompt = torch.ones(1, 200, dtype=torch.int64)
    >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    >>> cache.get_seq_length(), max(cache.kept[0]) < 120
    (202, True)
    """

    def __init__(self, *, tolerance: float | None = None) -> None:
        if tolerance is not None and not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is {tolerance} but is a share of softmax mass in [0, 1)")
        super().__init__(layer_class_to_replicate=_Layer)
        self.tolerance = tolerance

    @property
    def kept(self) -> list[tuple[int, ...]]:
        """Tokens that each key head of each layer holds."""
        return [() if layer.held is None else layer.held.kept for layer in self._held]

    @property
    def forgotten(self) -> list[tuple[int, ...]]:
        """Tokens that each key head of each layer has dropped."""
        return [() if layer.held is None else layer.held.forgotten for layer in self._held]

    @property
    def nbytes(self) -> int:
        """Memory of the cached tensors, including spare capacity."""
        return sum(layer.held.nbytes for layer in self._held if layer.held is not None)

    def of_layer(self, layer_idx: int, make: Callable[[], GatedReachCache]) -> GatedReachCache:
        """The cache of one layer, which `make` creates for the first tokens.

        Raises:
            ValueError: a forward pass was interrupted, so that only some layers hold its tokens.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer())
        lengths = {layer.get_seq_length() for layer in self._held}
        if layer_idx == 0 and len(lengths) > 1:
            raise ValueError(
                f"the layers of this cache hold {sorted(lengths)} tokens, because a forward pass was interrupted; pass the text "
                "again with a new ForgettingCache()"
            )
        layer = self._held[layer_idx]
        if layer.held is None:
            layer.held, layer.is_initialized = make(), True
        return layer.held

    def cut(self, layer_idx: int, log_fgate: Tensor, seen: Tensor | None) -> Tensor:
        """The gates [B, H, T] of new tokens, with a cut at the first visible token of each row that begins with padding.

        Args:
            seen: [B, S] bool, over all tokens up to these; None = all are visible.

        Raises:
            ValueError: the mask hides other tokens than padding on the left, or differs from that of earlier calls.
        """
        batch, _, new = log_fgate.shape
        layer = self._held[layer_idx]
        first = layer.get_seq_length()
        padding = log_fgate.new_zeros(batch, dtype=torch.int64)
        if seen is not None:
            padding = seen.logical_not().long().cumprod(1).sum(1)
        before = torch.zeros_like(padding) if layer.padding is None else layer.padding
        if padding.device.type == "cpu" and (
            not torch.equal(padding.clamp(max=first), before)
            or (seen is not None and not torch.equal(seen.sum(1) + padding, torch.full_like(padding, seen.shape[1])))
        ):
            raise ValueError(
                "the attention mask hides tokens that are not padding on the left, or that earlier calls saw; a ForgettingCache "
                "has dropped keys for one mask. Pad on the left, or use an ALiBiCache"
            )
        layer.padding = padding
        if seen is None:
            return log_fgate
        at = torch.arange(first, first + new, device=padding.device)
        return log_fgate.masked_fill(((at == padding[:, None]) & (at > 0))[:, None], -torch.inf)

    def __repr__(self) -> str:
        return f"ForgettingCache({self.get_seq_length()} tokens, {len(self.layers)} layers keep {self.kept}, {self.nbytes} bytes)"

    @property
    def _held(self) -> list["_Layer"]:
        return cast("list[_Layer]", self.layers)


class _Layer(CacheLayerMixin):
    """One layer, with transformers' interface; `keys` and `values` stay None, because heads keep different numbers."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: GatedReachCache | None = None
        self.padding: Tensor | None = None  # [B]: hidden tokens at the start of each row

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError(_FOR_GATES)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise ValueError(_FOR_GATES)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.held is None else len(self.held)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.held, self.padding, self.is_initialized = None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove not in (0, self.get_seq_length()):
            raise ValueError(
                "a ForgettingCache cannot return to fewer tokens, as assisted generation and prompt lookup do: the gates of the "
                "last tokens may have dropped keys; use an ALiBiCache"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.padding is not None:
            self._take(torch.arange(len(self.padding)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.padding is not None:
            self._take(torch.arange(len(self.padding), device=indices.device)[indices])

    def offload(self) -> None:
        raise NotImplementedError("a ForgettingCache cannot be offloaded; use an ALiBiCache")

    def _take(self, rows: Sequence[int] | Tensor) -> None:
        if self.held is not None and self.padding is not None:
            self.held.reorder(rows)
            self.padding = self.padding[torch.as_tensor(rows, device=self.padding.device)]


_FOR_GATES = (
    "a ForgettingCache is for models with forget gates, which tell what to drop, such as a Forgetting Transformer read by "
    "ALiBiForCausalLM; use an ALiBiCache"
)
