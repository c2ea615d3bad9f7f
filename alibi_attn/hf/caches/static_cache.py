"""StaticALiBiCache: a cache of a fixed capacity, so that a CUDA graph replays a decoding step of a patched model.

`ALiBiCache` knows its length as a number, which a graph would repeat; here it is a tensor, as in transformers' `StaticCache`.
"""

import functools

from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.nn.static_cache import StaticKVCache


class StaticALiBiCache(Cache):
    """transformers' `StaticCache` with norms, so that a step of a patched model on a GPU reads only the keys within reach.

    Pass it as `past_key_values`, once before capturing a step: the first call allocates. Later calls, and replays, write into the
    same tensors, and no tensor is read on the host. After more than `capacity` tokens all outputs are NaN. With an
    attention mask, under torch.compile, or on a CPU, a step scores all keys up to its position. `reset()` begins a new text.

    Args:
        capacity: the largest number of tokens.

    >>> import torch
    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from alibi_attn.hf import patch
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    >>> cache = StaticALiBiCache(capacity=20)
    >>> with patch(model):
    ...     tokens = model.generate(torch.ones(1, 9, dtype=torch.int64), past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    >>> cache.get_seq_length()
    tensor(11)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = StaticKVCache(capacity).capacity
        super().__init__(layer_class_to_replicate=functools.partial(_Layer, self.capacity))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"StaticALiBiCache(capacity={self.capacity}, {len(self.layers)} layers)"

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.capacity, 0  # also before the first pass, which creates the layers

    def norms(self, layer_idx: int) -> Norms | None:
        """Norms of all keys and values of one layer; None where nothing reads them."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, _Layer)
        return layer.store.norms


class _Layer(StaticLayer):
    """One layer, with transformers' interface."""

    is_compileable = False  # `generate` would compile the model

    def __init__(self, capacity: int) -> None:
        super().__init__(max_cache_len=capacity)  # type: ignore[no-untyped-call]
        self.store = StaticKVCache(capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, _ = self.store.append(key_states, value_states)
        if self.keys is not keys:
            self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        return 0 if self.store.length is None else self.store.length

    def reset(self) -> None:
        self.store.crop(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("a StaticALiBiCache has no beams; use ALiBiCache()")

    def offload(self) -> None:
        raise NotImplementedError("a StaticALiBiCache cannot be offloaded; use DynamicCache(offloading=True)")
