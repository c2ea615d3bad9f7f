"""ALiBiCache: a cache for `generate` in which a new token of a patched model reads only the keys within reach.

A `DynamicCache` of transformers copies all keys and values for every new token, and attention then scores all of them. This
cache appends in place and stores norms of its keys and values: see `attention/decoding.py`.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.nn.cache import KVCache, check_format

FORMAT = 1  # of a pickle; the KVCaches inside have their own format number


class ALiBiCache(Cache):
    """Pass a new one as `past_key_values`: `model.generate(tokens, past_key_values=ALiBiCache())`.

    It replaces a `DynamicCache` in any model (beams, assisted generation, chunks, cropping), with the same outputs. In a patched
    model, the cost of attention per token then depends on the reach and not on the length of the text; with padding, each row
    pays only for its own tokens. All keys are still scored if the mask has holes, gradients are needed, numerics is not "exact",
    a `backend` is named, or under `torch.compile`; on a GPU also with any padding. On a CPU without a compiler, in fp64, or with
    a head size that is not a multiple of 16, all keys are scored below 2²³ cached elements per layer and sequence (8,192 tokens
    of 16 heads × 64).

    It can be copied and pickled. A pickle names its format and contains no transformers classes, so it survives upgrades.

    MPT's config has `use_cache=False`: pass `use_cache=True` to `generate`.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from alibi_attn.hf import patch
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    >>> cache = ALiBiCache()
    >>> with patch(model):
    ...     tokens = model.generate(torch.ones(1, 9, dtype=torch.int64), past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    >>> cache.get_seq_length()
    11
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_Layer)

    def __getstate__(self) -> dict[str, object]:
        return {"format": FORMAT, "stores": [self._layer(index).store for index in range(len(self.layers))]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_format("ALiBiCache", state, reads=FORMAT)
        ALiBiCache.__init__(self)
        self.layers = [_Layer(store=store) for store in state["stores"]]

    def norms(self, layer_idx: int) -> Norms:
        """Norms of the cached keys and values of one layer, which must not be empty."""
        return self._layer(layer_idx).store.norms

    def _layer(self, layer_idx: int) -> "_Layer":
        layer = self.layers[layer_idx]
        assert isinstance(layer, _Layer)
        return layer


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer, with transformers' interface; `store` holds the tensors, `keys` and `values` are views of it."""

    def __init__(self, *, store: KVCache | None = None, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.store = KVCache() if store is None else store
        self.owner: weakref.ref[nn.Module] | None = None
        if len(self.store):
            self.lazy_initialization(self.store.key, self.store.value)
        self._refresh_views()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, layer: nn.Module | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        owner = None if self.owner is None else self.owner()
        if layer is not None and owner is not layer:
            if owner is not None and len(self.store):
                raise ValueError(
                    "this ALiBiCache holds the keys of another model or layer; pass a new ALiBiCache(), or a copy "
                    "(copy.deepcopy) to continue with another model that has the same weights"
                )
            self.owner = weakref.ref(layer)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self.store.append(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return len(self.store)

    def reset(self) -> None:
        self.store, self.is_initialized = KVCache(), False
        self._refresh_views()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove −tokens_to_remove tokens; a positive number is the length to keep, as in older releases of transformers."""
        length = len(self.store)
        left = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self.store.crop(min(max(left, 0), length))
        self._refresh_views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if len(self.store):
            self.store.reorder(beam_idx)
            self._refresh_views()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if len(self.store):
            self.reorder_cache(torch.arange(self.store.key.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if len(self.store):
            self.reorder_cache(torch.arange(self.store.key.shape[0], device=indices.device)[indices])

    def offload(self) -> None:
        raise NotImplementedError("an ALiBiCache cannot be offloaded; use DynamicCache(offloading=True)")

    def _refresh_views(self) -> None:
        self.keys, self.values = (self.store.key, self.store.value) if len(self.store) else (None, None)
