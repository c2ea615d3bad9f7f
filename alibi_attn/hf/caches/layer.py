"""One layer of an ALiBiCache, with transformers' interface. Read before: `cache.py`."""

import weakref
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache.appending import held, traits
from alibi_attn.nn.cache.storage import Growing

NEEDS_PATCH = (
    "a cache in files needs a model that reads only the keys within reach: call patch(model) first, or use ALiBiCache()"
)
FOR_GATES = (
    "ALiBiCache(forget=True) is for models with forget gates, which tell what to drop, such as a Forgetting Transformer read by "
    "ALiBiForCausalLM; use ALiBiCache()"
)


def _side(at: int) -> property:
    """Keys (0) or values (1), [B, K, S, D], or None; tensors may be assigned, both sides if the length differs."""

    def side(layer: "CacheLayer") -> Tensor | None:
        store = layer._store
        if layer._assigned is not None:
            return layer._assigned[at]
        if store.fixed is not None:
            return store.fixed.tensors[0][at] if store.fixed.tensors else None
        return store.groups[0].filled()[at] if store.retention is None and len(store) else None

    def assign(layer: "CacheLayer", given: Tensor | None) -> None:
        if traits(layer._store):
            raise ValueError(
                "keys and values of a cache in files, of a fixed capacity or that forgets cannot be assigned; use crop(), or "
                "assign to a copy (copy.deepcopy)"
            )
        layer._assigned = (given, layer.values) if at == 0 else (layer.keys, given)

    return property(side, assign)


class CacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """`store` holds the tensors; `keys` and `values` are views of it, or None where heads keep different tokens.

    Args:
        store: empty and plain for a cache that forgets, until the first layer with forget gates makes it.
        forgets: only a layer with forget gates may append.
    """

    def __init__(self, store: KVCache, *, forgets: bool = False) -> None:
        self._store = KVCache()  # transformers' constructor assigns None to keys and values
        self._assigned: tuple[Tensor | None, Tensor | None] | None = None  # keys and values until `store` is read
        self.owner: weakref.ref[nn.Module] | None = None
        self.moved = False  # rows of the batch, since the layer was empty
        self.padding: Tensor | None = None  # [B]: hidden tokens at the start of each row, of a cache that forgets
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._assigned, self.forgets = store, None, forgets
        self.is_croppable = store.capacity is None and not forgets
        if (keys := self.keys) is not None:
            self.lazy_initialization(keys, keys)

    @property
    def store(self) -> KVCache:
        """The cache that holds the tensors, also those that were assigned to `keys` and `values`."""
        if self._assigned is not None:
            keys, values = self._assigned
            of_keys, of_values = (None if x is None else list(x.shape[:3]) for x in (keys, values))
            if of_keys != of_values:
                raise ValueError(
                    f"keys {of_keys} and values {of_values} of a layer of this ALiBiCache, [B, K, S], differ; assign both: "
                    "layer.keys, layer.values = ..."
                )
            self._assigned = None
            if keys is None or values is None:
                self._store = KVCache()
            else:
                self._store.groups = [Growing((keys, values), changed=True)]
                self.lazy_initialization(keys, values)
        return self._store

    keys, values = _side(0), _side(1)

    def own(self, layer: nn.Module) -> None:
        """Raises ValueError if another layer has appended to the cache."""
        owner = None if self.owner is None else self.owner()
        if owner is not None and owner is not layer and self.get_seq_length():
            raise ValueError(
                "this ALiBiCache holds the keys of another model or layer; pass a new ALiBiCache(), or a copy "
                "(copy.deepcopy) to continue with another model that has the same weights"
            )
        if owner is not layer:
            self.owner = weakref.ref(layer)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.forgets or self.store.path is not None:
            raise ValueError(FOR_GATES if self.forgets else NEEDS_PATCH)
        self.lazy_initialization(key_states, value_states)
        [kept] = self.store.append(key_states, value_states)
        return kept.key, kept.value

    def get_seq_length(self) -> int:
        """A 0-d tensor with a capacity, after the first pass."""
        if self.store.fixed is None:
            return len(self.store)
        return 0 if self.store.fixed.length is None else cast("int", self.store.fixed.length)

    def reset(self) -> None:
        self.is_initialized, self._assigned, self.padding, self.moved = False, None, None, False
        if self.forgets:  # the next text may have other weights, which bound its scores
            self._store = KVCache()
        else:
            self._store.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove −tokens_to_remove tokens; a positive number is the length to keep, as in older releases of transformers."""
        length = len(self.store)
        left = min(max(tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove, 0), length)
        if self.forgets and left not in (0, length):
            raise ValueError(
                "ALiBiCache(forget=True) cannot return to fewer tokens, as assisted generation and prompt lookup do: the gates "
                "of the last tokens may have dropped keys; use ALiBiCache()"
            )
        self.store.crop(left)
        self.moved = self.moved and left > 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store.fixed is None and not len(self.store):
            return
        self.store.reorder(beam_idx)
        self.moved = self.store.path is None  # in a file all rows are where they were
        if self.padding is not None:
            self.padding = self.padding[beam_idx.to(self.padding.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self._batch()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(self._batch(), device=indices.device)[indices])

    def offload(self) -> None:
        raise NotImplementedError("an ALiBiCache cannot be offloaded; use DynamicCache(offloading=True)")

    def _batch(self) -> int:
        tensors = held(self.store)
        return tensors[0][0].shape[0] if tensors and tensors[0] else 0


def cut_after_padding(layer: CacheLayer, log_fgate: Tensor, seen: Tensor | None) -> Tensor:
    """The gates [B, H, T] of new tokens, with a cut at the first visible token of each row that begins with padding.

    Args:
        seen: [B, S] bool, over all tokens up to these; None = all are visible.

    Raises:
        ValueError: the mask hides other tokens than padding on the left, or differs from that of earlier calls.
    """
    batch, _, new = log_fgate.shape
    first = layer.get_seq_length()
    hidden = torch.zeros(batch, 0, device=log_fgate.device) if seen is None else seen.logical_not()
    padding = hidden.long().cumprod(1).sum(1)
    before = torch.zeros_like(padding) if layer.padding is None else layer.padding
    if padding.device.type == "cpu" and (
        not torch.equal(padding.clamp(max=first), before.clamp(max=first))
        or (seen is not None and not torch.equal(seen.sum(1) + padding, torch.full_like(padding, seen.shape[1])))
    ):
        raise ValueError(
            "the attention mask hides tokens that are not padding on the left, or that earlier calls saw; "
            "ALiBiCache(forget=True) has dropped keys for one mask. Pad on the left, or use ALiBiCache()"
        )
    layer.padding = padding
    if seen is None:
        return log_fgate
    at = torch.arange(first, first + new, device=padding.device)
    return log_fgate.masked_fill(((at == padding[:, None]) & (at > 0))[:, None], -torch.inf)
