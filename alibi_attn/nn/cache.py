"""KVCache: the keys and values that one attention layer keeps while decoding."""

import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class KVCache:
    """Keys and values of the positions seen so far, [B, K, S, D]; `len(cache)` is S.

    One cache belongs to one attention layer, and is the only thing that a forward pass changes. Without gradients
    (`torch.no_grad()`, `torch.inference_mode()`) appending writes into spare room that doubles when it is full, so
    that S single steps copy O(S) keys in all. With gradients enabled every append makes new tensors: slower, and
    right: the loss of a later chunk reaches the keys of an earlier one.

    ALiBi adds nothing to the keys: cropping, reordering and other slopes never make a cache stale.

    >>> cache = KVCache()
    >>> with torch.no_grad():
    ...     for step in range(3):
    ...         key, value = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> len(cache), key.shape
    (3, torch.Size([1, 2, 3, 4]))
    """

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0
        self._has_room = False  # the tensors above are ours to write into
        self._layer: weakref.ref[nn.Module] | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def key(self) -> Tensor:
        """The keys, [B, K, S, D], a view."""
        return self._filled(self._key)

    @property
    def value(self) -> Tensor:
        """The values, [B, K, S, D], a view."""
        return self._filled(self._value)

    def append(self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Add key and value, [B, K, T, D], behind what is there; returns all keys and all values, [B, K, S + T, D].

        Args:
            layer: the attention layer that appends; a second one is refused.

        Raises:
            ValueError: another layer, or shapes, dtype or device that do not fit what the cache holds.
        """
        self._check(key, value, layer)
        new_length = self._length + key.shape[2]
        if self._key is None or self._value is None:
            self._key, self._value, self._has_room = key, value, False
        elif torch.is_grad_enabled():
            self._key = torch.cat([self.key, key], dim=2)
            self._value = torch.cat([self.value, value], dim=2)
            self._has_room = False
        else:
            if not self._can_hold(self._key, new_length):
                self._key = _with_room(self.key, 2 * new_length)
                self._value = _with_room(self.value, 2 * new_length)
                self._has_room = True
            self._key[:, :, self._length : new_length] = key
            self._value[:, :, self._length : new_length] = value
        self._length = new_length
        return self.key, self.value

    def crop(self, length: int) -> None:
        """Keep the first `length` positions: takes back a speculative draft, or with 0 empties the cache.

        Raises:
            ValueError: `length` is negative or more than the cache holds.
        """
        length = operator.index(length)
        if not 0 <= length <= self._length:
            raise ValueError(
                f"length is {length} but the cache holds {self._length} positions: crop to 0 … {self._length}"
            )
        self._length = length
        if length == 0:
            self._key = self._value = None

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Row b of the batch becomes what row `indices[b]` was: beam search keeps, drops and copies its beams.

        Raises:
            TypeError: `indices` are not integers.
            ValueError: not one-dimensional, or (on the CPU) outside the batch.
        """
        if self._key is None or self._value is None:
            raise ValueError("the cache is empty and has no batch to reorder; append first")
        rows = torch.as_tensor(indices, device=self._key.device)
        if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
            raise TypeError(f"indices are {rows.dtype} but must be integers: row b takes what row indices[b] held")
        batch = self._key.shape[0]
        if rows.ndim != 1 or rows.numel() == 0:
            raise ValueError(f"indices has shape {list(rows.shape)} but must be [B], one row number per new row")
        if rows.device.type == "cpu" and not bool(((rows >= 0) & (rows < batch)).all()):
            raise ValueError(f"indices are {rows.tolist()} but the cache has rows 0 … {batch - 1}")
        self._key = self._key.index_select(0, rows)
        self._value = self._value.index_select(0, rows)

    def _filled(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise ValueError("the cache is empty: it has keys and values after the first forward pass")
        return tensor if tensor.shape[2] == self._length else tensor[:, :, : self._length]

    def _can_hold(self, tensor: Tensor, length: int) -> bool:
        if not self._has_room or length > tensor.shape[2]:
            return False
        if torch.compiler.is_compiling():  # which can trace no question about inference mode
            return True
        return torch.is_inference_mode_enabled() or not tensor.is_inference()

    def _check(self, key: Tensor, value: Tensor, layer: nn.Module | None) -> None:
        if layer is not None and not torch.compiler.is_compiling():
            if self._layer is None:
                self._layer = weakref.ref(layer)
            elif self._layer() is not layer:
                raise ValueError("this KVCache belongs to another attention layer; make one KVCache() for each layer")
        if key.ndim != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key has shape {list(key.shape)} and value {list(value.shape)} but both must be [B, K, T, D]"
            )
        if self._key is None or self._value is None:
            return
        for name, new, old in (("key", key, self.key), ("value", value, self.value)):
            fits = new.ndim == 4 and new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
            if not (fits and new.dtype == old.dtype and new.device == old.device):
                raise ValueError(
                    f"{name} is {_described(new)} but the cache holds {_described(old)}: only the length may differ; "
                    "a new batch needs a new KVCache()"
                )


def _with_room(tensor: Tensor, capacity: int) -> Tensor:
    batch, heads, length, head_dim = tensor.shape
    roomy = tensor.new_empty(batch, heads, capacity, head_dim)
    roomy[:, :, :length] = tensor
    return roomy


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
