"""One layer of an ALiBiCache, with transformers' interface. Read before: `cache.py`."""

import weakref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from alibi_attn.nn.cache import KVCache

NEEDS_PATCH = (
    "a cache in files needs a model that reads only the keys within reach: call patch(model) first, or use ALiBiCache()"
)


class CacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer, with transformers' interface; `store` holds the tensors, `keys` and `values` are views of it."""

    def __init__(self, *, store: KVCache | None = None, **kwargs: object) -> None:
        self._store = KVCache()
        self._assigned: dict[str, Tensor | None] = {}  # keys or values that wait for the other
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._store = KVCache() if store is None else store
        self.owner: weakref.ref[nn.Module] | None = None
        if len(self.store):
            self.lazy_initialization(self.store.key, self.store.value)

    @property
    def store(self) -> KVCache:
        """The cache that holds the tensors."""
        if self._assigned:
            [name] = self._assigned
            raise ValueError(
                f"only {name} of a layer of this ALiBiCache were assigned, with {_described(self._assigned[name])} instead of "
                f"{len(self._store)} tokens; assign both: layer.keys, layer.values = ..."
            )
        return self._store

    @property
    def keys(self) -> Tensor | None:
        """[B, K, S, D], or None. Another tensor may be assigned, together with `values` if its length differs."""
        return self._side("keys")

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign("keys", keys)

    @property
    def values(self) -> Tensor | None:
        """[B, K, S, D], or None, as `keys`."""
        return self._side("values")

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign("values", values)

    def _side(self, name: str) -> Tensor | None:
        if name in self._assigned:
            return self._assigned[name]
        if not len(self._store):
            return None
        return self._store.key if name == "keys" else self._store.value

    def _assign(self, name: str, given: Tensor | None) -> None:
        if self._store.path is not None:
            raise ValueError(
                "keys and values of a cache in files cannot be assigned; use crop(), or assign to a copy (copy.deepcopy)"
            )
        self._assigned[name] = given
        keys, values = self._side("keys"), self._side("values")
        if (keys is None) != (values is None):
            return  # until the other is assigned, too
        if keys is None or values is None:
            self._store = KVCache()
        elif keys.shape[:3] != values.shape[:3]:
            return
        else:
            self._store.assign(keys, values)
            self.lazy_initialization(keys, values)
        self._assigned.clear()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        layer: nn.Module | None = None,
        log_fgate: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        if layer is None and self.store.path is not None:
            raise ValueError(NEEDS_PATCH)
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
        return self.store.append(key_states, value_states, log_fgate=log_fgate)

    def get_seq_length(self) -> int:
        return len(self.store)

    def reset(self) -> None:
        self._assigned.clear()
        if self.store.path is None:
            self._store = KVCache()
        elif len(self.store):
            self.store.crop(0)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove −tokens_to_remove tokens; a positive number is the length to keep, as in older releases of transformers."""
        length = len(self.store)
        left = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self.store.crop(min(max(left, 0), length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if len(self.store):
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if len(self.store):
            self.reorder_cache(torch.arange(self.store.key.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if len(self.store):
            self.reorder_cache(torch.arange(self.store.key.shape[0], device=indices.device)[indices])

    def offload(self) -> None:
        raise NotImplementedError("an ALiBiCache cannot be offloaded; use DynamicCache(offloading=True)")


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str(tensor.shape[2])
