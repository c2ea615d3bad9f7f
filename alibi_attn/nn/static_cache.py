"""Caches of a fixed capacity whose length is a tensor, so that a CUDA graph replays a decoding step with a growing length.

`KVCache` and `ReachCache` know their length as a number, which a graph would repeat. Here no tensor is read on the host, and the
shapes of a step never change. transformers' `StaticCache` is the same idea.
"""

import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alibi_attn.attention.backends.fused import append as on_device
from alibi_attn.attention.call.spec import index_of, query_heads
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms, norm_bound
from alibi_attn.attention.decoding import skips_on_device
from alibi_attn.nn.cache_checks import check_pair
from alibi_attn.nn.kept_norms import normal_tensors


class StaticKVCache:
    """Keys and values of one layer, [B, K, capacity, D], for steps that a CUDA graph or torch.compile replays.

    Call the layer once before capturing a step: the first call allocates. Later calls, and replays, write into the same tensors.
    The layer must be causal and have no forget gates; key masks and segment ids are [B, capacity]. Gradients must be off. After
    more than `capacity` tokens all outputs are NaN. On a GPU a step without masks, outside torch.compile, reads only the
    tiles of keys within reach.

    Args:
        capacity: the largest number of tokens.

    >>> cache = StaticKVCache(capacity=100)
    >>> with torch.no_grad():
    ...     for step in range(3):
    ...         key, value, position = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> key.shape, position, cache.length
    (torch.Size([1, 2, 100, 4]), tensor(2), tensor(3))
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = _checked_capacity(capacity)
        self.length: Tensor | None = None  # int64, the number of tokens; None before the first call
        self.norms: Norms | None = None  # on devices whose kernels read only the keys within reach
        self._arrived: Tensor | None = None  # of the kernel that appends
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._layer: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        return f"StaticKVCache(capacity={self.capacity})"

    def append(self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Writes key and value, [B, K, T, D], after the present ones; returns all keys and values, [B, K, capacity, D], and the
        position of the first new one. What follows the last token is in the future of every query.

        Raises:
            ValueError: the layer differs, shapes do not match, gradients are on, or there are more tokens than the capacity.
        """
        _check_append(key, value, self._tensors)
        if layer is not None and not torch.compiler.is_compiling():
            self._layer = _owner(self._layer, layer)
        if self._tensors is None or self.length is None:
            self._tensors = _zeros(key, self.capacity), _zeros(value, self.capacity)
            self.length = _counter(key)
            if skips_on_device(key):
                shape = *key.shape[:2], -(-self.capacity // TILE)
                with normal_tensors():
                    self.norms = Norms(*(key.new_zeros(shape, dtype=torch.float64) for _ in range(2)))
                    self._arrived = key.new_zeros((), dtype=torch.int32)
        count = key.shape[2]
        if count > self.capacity:
            raise ValueError(
                f"{count} tokens do not fit capacity={self.capacity}; create a StaticKVCache that is larger"
            )
        if self.norms is not None and self._arrived is not None and on_device.appends(key, value):
            first = on_device.append(key, value, self._tensors, self.norms, self.length, self._arrived)
        else:
            first = self._append_by_torch(key, value, self._tensors, self.length)
        return *self._tensors, first

    def _append_by_torch(self, key: Tensor, value: Tensor, held: tuple[Tensor, Tensor], length: Tensor) -> Tensor:
        """`fused.append.append`, as torch operations."""
        count = key.shape[2]
        key = key.masked_fill(length + count > self.capacity, torch.nan)
        place = (length + torch.arange(count, device=key.device)).clamp(max=self.capacity - 1)
        for tensor, new in zip(held, (key, value), strict=True):
            tensor.index_copy_(2, place, new)
        if self.norms is not None:
            tiles = (place // TILE).expand(*key.shape[:2], count)
            for norms, new in ((self.norms.keys, key), (self.norms.values, value)):
                norms.scatter_reduce_(2, tiles, norm_bound(new).nan_to_num(torch.inf, torch.inf), "amax")
        first = length.clone()
        length.add_(count)
        return first

    def crop(self, length: int | Tensor) -> None:
        """Keeps the first `length` tokens, an int or an integer tensor, which is not read; 0 begins a new text."""
        if self.length is None:
            return
        self.length.copy_(torch.as_tensor(length).reshape(()), non_blocking=True)
        if self.norms is not None:
            after = torch.arange(self.norms.keys.shape[2], device=self.length.device) * TILE >= self.length
            for norms in (self.norms.keys, self.norms.values):
                norms.masked_fill_(after, 0.0)


class StaticReachCache:
    """A `ReachCache` for steps that are replayed: per head the keys within reach, in tensors of twice that size.

    Create it with `layer.reach_cache().static(capacity)`, and see `StaticKVCache`. Heads whose reach is shorter than the capacity
    decode indefinitely; if one needs more, outputs are NaN after `capacity` tokens. No masks.

    Args:
        key_heads, limits: of `ReachCache`: groups of key heads, and the keys that each needs, including the query's own.
        num_heads: H.
        capacity: the most keys that any head keeps.
    """

    def __init__(self, key_heads: list[list[int]], limits: Sequence[int], num_heads: int, capacity: int) -> None:
        self.capacity = _checked_capacity(capacity)
        self.key_heads = key_heads
        self.query_heads = [query_heads(members, num_heads // sum(map(len, key_heads))) for members in key_heads]
        self.runs = runs_of(self.query_heads)
        self._limits = limits
        # For each group its query heads, and for each query head its place in the groups, as indices.
        self.queries: list[Tensor | slice] = []
        self.order: Tensor | slice = slice(None)
        self._members: list[Tensor | slice] = []
        self.length: Tensor | None = None  # int64, the number of tokens seen; None before the first call
        self._tensors: list[tuple[Tensor, Tensor]] = []  # of each group: parts of those that are held
        self._held: tuple[Tensor, Tensor] | None = None
        self._rings: Tensor | None = None  # [K, 5] int64, the `Ring` of every key head
        self._arrived: Tensor | None = None  # of the kernel that appends
        self._layer: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        return f"StaticReachCache(capacity={self.capacity}; groups of key heads keep {[x - 1 for x in self._kept()]})"

    def append(
        self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Adds key and value, [B, K, T, D]; returns for each group of `key_heads` the keys and values that these T queries need,
        [B, members, S', D], the new ones last, and which of them exist, [B, S'] bool.

        Raises:
            ValueError: as for `StaticKVCache`.
        """
        length = self._begin(key, value, layer)
        parts, count = [], key.shape[2]
        for members, ring, held in zip(self._members, self._kept(), self._tensors, strict=True):
            again = held[0].shape[2] > ring
            new = key[:, members], value[:, members]
            if not again:
                new = new[0].masked_fill(length + count > self.capacity, torch.nan), new[1]
            before = (length + torch.arange(1 - ring, 0, device=key.device)).remainder(ring)
            keys, values = (torch.cat([x.index_select(2, before), y], 2) for x, y in zip(held, new, strict=True))
            exists = torch.arange(ring - 1 + count, device=key.device) >= ring - 1 - length
            parts.append((keys, values, exists.expand(key.shape[0], -1)))
            skipped = max(count - ring, 0)
            place = (length + torch.arange(skipped, count, device=key.device)).remainder(ring)
            for old, x in zip(held, new, strict=True):
                old.index_copy_(2, place, x[:, :, skipped:])
                if again:
                    old.index_copy_(2, place + ring, x[:, :, skipped:])
        length.add_(count)
        return parts

    def appends_one(self, key: Tensor, value: Tensor) -> bool:
        """Whether `append_one` supports these keys and values, and groups of consecutive heads."""
        return len(self.runs) > 0 and on_device.appends(key, value)

    def append_one(
        self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Adds one token by one kernel; returns the keys and values of each group, [B, members, S', D], and in which row of them
        the token lies, [groups] int64. The rows up to it that `windows` leaves are the tokens up to it.
        """
        length = self._begin(key, value, layer)
        assert self._held is not None
        assert self._rings is not None
        assert self._arrived is not None
        groups = len(self.key_heads)
        first = on_device.append_to_rings(key, value, self._held, self._rings, groups, length, self._arrived)
        return self._tensors, first

    def windows(self, window: int | None) -> tuple[int | None, ...]:
        """The window of each group in a layer with this one."""
        rings = [None if limit > self.capacity else limit for limit in self._limits]
        return tuple(min((x for x in (ring, window) if x is not None), default=None) for ring in rings)

    def _begin(self, key: Tensor, value: Tensor, layer: nn.Module | None) -> Tensor:
        """Checks a call, and allocates in the first one; returns the length."""
        _check_append(key, value, None)
        if layer is not None and not torch.compiler.is_compiling():
            self._layer = _owner(self._layer, layer)
        if self.length is None:
            self._allocate(key, value)
        assert self.length is not None
        return self.length

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        """Tensors, and indices of heads on the device: a list would be copied there at every step."""
        self.length = _counter(key)
        self._members = [_index(members, key.device) for members in self.key_heads]
        self.queries = [_index(heads, key.device) for heads in self.query_heads]
        heads = [head for members in self.query_heads for head in members]
        self.order = _index(sorted(range(len(heads)), key=heads.__getitem__), key.device)
        rings: dict[int, on_device.Ring] = {}
        begins, start, batch = [], 0, key.shape[0]
        for group, (members, limit, kept) in enumerate(zip(self.key_heads, self._limits, self._kept(), strict=True)):
            again = limit <= self.capacity
            size = kept * (1 + again)
            for at, head in enumerate(members):
                first = group if at == 0 else -1
                rings[head] = on_device.Ring(start + at * size, len(members) * size, kept, again, first)
            begins.append((start, batch, len(members), size))
            start += batch * len(members) * size
        with normal_tensors():
            self._held = key.new_zeros(start, key.shape[3]), value.new_zeros(start, value.shape[3])
            self._rings = torch.tensor([rings[head] for head in sorted(rings)], device=key.device)
            self._arrived = key.new_zeros((), dtype=torch.int32)
        keys, values = (
            [x[begin : begin + b * n * size].view(b, n, size, -1) for begin, b, n, size in begins] for x in self._held
        )
        self._tensors = list(zip(keys, values, strict=True))

    def crop(self, length: int) -> None:
        """crop(0) begins a new text; other lengths would need forgotten keys.

        Raises:
            ValueError: another length.
        """
        if operator.index(length) != 0:
            raise ValueError(f"length is {length} but a StaticReachCache forgets keys; crop(0) empties it")
        if self.length is not None:
            self.length.zero_()

    def _kept(self) -> list[int]:
        return [min(limit, self.capacity) for limit in self._limits]


def runs_of(query_heads: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """The first query head of each group and the one after its last; empty if some group is not a run of heads."""
    runs = tuple((heads[0], heads[-1] + 1) for heads in query_heads)
    return runs if all(b - a == len(heads) for (a, b), heads in zip(runs, query_heads, strict=True)) else ()


def _index(heads: list[int], device: torch.device) -> Tensor | slice:
    index = index_of(heads)
    return torch.tensor(index, device=device) if isinstance(index, list) else index


StaticCache = StaticKVCache | StaticReachCache


def _checked_capacity(capacity: int) -> int:
    if operator.index(capacity) < 1:
        raise ValueError(f"capacity is {capacity} but must be at least 1, the largest number of tokens")
    return operator.index(capacity)


def _check_append(key: Tensor, value: Tensor, held: tuple[Tensor, Tensor] | None) -> None:
    check_pair(key, value, held)
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError("a static cache is written in place and has no gradients; call the layer in torch.no_grad()")


def _owner(known: "weakref.ref[nn.Module] | None", layer: nn.Module) -> "weakref.ref[nn.Module]":
    if known is not None and known() is not layer:
        raise ValueError("this static cache belongs to another attention layer; create one for each layer")
    return known or weakref.ref(layer)


def _zeros(source: Tensor, length: int) -> Tensor:
    with normal_tensors():
        return source.new_zeros(*source.shape[:2], length, source.shape[3])


def _counter(source: Tensor) -> Tensor:
    with normal_tensors():
        return torch.zeros((), dtype=torch.int64, device=source.device)
