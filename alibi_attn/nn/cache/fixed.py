"""Fixed: keys and values in tensors of a fixed capacity whose length is a tensor, so that a CUDA graph replays a decoding step.

`Growing` knows its length as a number, which a graph would repeat. Here no tensor is read on the host, and the shapes of a step
never change. transformers' `StaticCache` is the same idea. Read next: `cache.py`.
"""

import operator

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import append as on_device
from alibi_attn.attention.call.spec import index_of
from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms, norm_bound
from alibi_attn.attention.kept import Kept
from alibi_attn.attention.run.decoding import reads_groups, skips_on_device
from alibi_attn.nn.cache.retention import Certified
from alibi_attn.nn.cache.storage import normal_tensors


class Fixed:
    """The last keys and values of each group of key heads; tensors are allocated by the first `append`.

    Args:
        capacity: the largest number of tokens, or with a reach of keys that a head keeps.
        retention: of its groups of key heads; None = all heads keep all tokens.

    Attributes:
        length: 0-d int64, the number of tokens seen; None before the first.
        norms: of all keys and values, on devices whose kernels read only the keys within reach.
        tensors: the keys and values of each group.
    """

    # Of rings: all keys and values, of which `tensors` are parts, and [K, 5] int64, the `Ring` of every key head.
    _held: tuple[Tensor, Tensor]
    _rings: Tensor
    _arrived: Tensor  # of the kernels that append

    def __init__(self, capacity: int, retention: Certified | None) -> None:
        if operator.index(capacity) < 1:
            raise ValueError(f"capacity is {capacity} but must be at least 1, the largest number of tokens")
        self.capacity, self.retention = operator.index(capacity), retention
        self.length: Tensor | None = None
        self.norms: Norms | None = None
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self._members: list[slice | Tensor] = []  # of each group: its key heads, and its query heads
        self._queries: list[slice | Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> list[Kept]:
        """Writes key and value, [B, K, T, D], after the present ones. What follows the last token is in every query's future.

        Raises:
            ValueError: T exceeds the capacity, and all tokens are kept.
        """
        if self.retention is None and key.shape[2] > self.capacity:
            raise ValueError(
                f"{key.shape[2]} tokens do not fit capacity={self.capacity}; create a KVCache that is larger"
            )
        length = self._allocate(key, value) if self.length is None else self.length
        if self.retention is not None:
            return self._append_to_rings(key, value, length, self.retention)
        norms = self.norms
        if norms is not None and on_device.appends(key, value):
            first = on_device.append(key, value, self.tensors[0], norms, length, self._arrived)
        else:
            first = self._append_by_torch(key, value, length)
        return [Kept(*self.tensors[0], first=first, norms=None if norms is None else lambda: norms)]

    def crop(self, length: int | Tensor) -> None:
        """Keeps the first `length` tokens, an int or an integer tensor; 0 begins a new text. On a device, where it is not
        read, it is limited to 0 and the present length.

        Raises:
            ValueError: a number outside these limits; or not 0, where keys are forgotten.
        """
        if self.retention is not None and operator.index(length) != 0:
            raise ValueError(f"length is {length} but a cache of a fixed reach forgets keys; crop(0) empties it")
        held = 0 if self.length is None else self.length
        if not isinstance(length, Tensor) or may_read(length):
            known = not isinstance(held, Tensor) or may_read(held)
            if int(length) < 0 or (known and int(length) > int(held)):
                has = f"holds {int(held)} positions" if known else "must keep 0 positions or more"
                raise ValueError(f"length is {int(length)} but the cache {has}")
        if self.length is None:
            return
        if isinstance(length, Tensor):
            length = length.reshape(()).to(self.length.device, torch.int64, non_blocking=True).clamp(min=0)
        self.length.clamp_(max=length)
        if self.norms is not None:
            after = torch.arange(self.norms.keys.shape[2], device=self.length.device) * TILE >= self.length
            for norms in (self.norms.keys, self.norms.values):
                norms.masked_fill_(after, 0.0)

    def _append_by_torch(self, key: Tensor, value: Tensor, length: Tensor) -> Tensor:
        """`fused.append.append`, as torch operations."""
        count = key.shape[2]
        key = key.masked_fill(length + count > self.capacity, torch.nan)
        place = (length + torch.arange(count, device=key.device)).clamp(max=self.capacity - 1)
        for tensor, new in zip(self.tensors[0], (key, value), strict=True):
            tensor.index_copy_(2, place, new)
        if self.norms is not None:
            tiles = (place // TILE).expand(*key.shape[:2], count)
            for norms, new in ((self.norms.keys, key), (self.norms.values, value)):
                norms.scatter_reduce_(2, tiles, norm_bound(new).nan_to_num(torch.inf, torch.inf), "amax")
        first = length.clone()
        length.add_(count)
        return first

    def _append_to_rings(self, key: Tensor, value: Tensor, length: Tensor, retention: Certified) -> list[Kept]:
        """One token by one kernel, if the groups are runs of heads; else, for each group, copies with the new tokens last."""
        count, kept = key.shape[2], []
        of_groups = retention.heads, retention.limits or (), self._members, self._queries, self.tensors
        groups = list(zip(*of_groups, strict=True))
        in_runs = all(isinstance(index, slice) for index in self._queries)
        if count == 1 and in_runs and reads_groups(key) and on_device.appends(key, value):
            firsts = on_device.append_to_rings(key, value, self._held, self._rings, len(groups), length, self._arrived)
            for first, (heads, limit, _, select, held) in zip(firsts, groups, strict=True):
                window = None if limit > self.capacity else limit
                kept.append(Kept(*held, heads, first, window=window, select=select, firsts=firsts))
            return kept
        for heads, limit, members, select, held in groups:
            ring, again = min(limit, self.capacity), limit <= self.capacity
            new = key[:, members], value[:, members]
            if not again:
                new = new[0].masked_fill(length + count > self.capacity, torch.nan), new[1]
            before = (length + torch.arange(1 - ring, 0, device=key.device)).remainder(ring)
            both = (torch.cat([x.index_select(2, before), y], 2) for x, y in zip(held, new, strict=True))
            exists = torch.arange(ring - 1 + count, device=key.device) >= ring - 1 - length
            shown = exists.expand(key.shape[0], -1)
            kept.append(Kept(next(both), next(both), heads, ring - 1, exists=shown, select=select))
            skipped = max(count - ring, 0)
            place = (length + torch.arange(skipped, count, device=key.device)).remainder(ring)
            for old, x in zip(held, new, strict=True):
                old.index_copy_(2, place, x[:, :, skipped:])
                if again:
                    old.index_copy_(2, place + ring, x[:, :, skipped:])
        length.add_(count)
        return kept

    def _allocate(self, key: Tensor, value: Tensor) -> Tensor:
        """Tensors, and indices of heads on the device: a list would be copied there at every step. Returns the length."""
        with normal_tensors():
            self.length = torch.zeros((), dtype=torch.int64, device=key.device)
            self._arrived = key.new_zeros((), dtype=torch.int32)
            if self.retention is not None:
                self._allocate_rings(key, value, self.retention)
                return self.length
            self.tensors = [tuple(x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (key, value))]  # type: ignore[list-item]
            if skips_on_device(key):
                shape = *key.shape[:2], -(-self.capacity // TILE)
                self.norms = Norms(*(key.new_zeros(shape, dtype=torch.float64) for _ in range(2)))
        return self.length

    def _allocate_rings(self, key: Tensor, value: Tensor, retention: Certified) -> None:
        indices = [[index_of(list(x)) for x in groups] for groups in (retention.key_heads, retention.heads)]
        self._members, self._queries = (
            [torch.tensor(x, device=key.device) if isinstance(x, list) else x for x in found] for found in indices
        )
        rings: dict[int, on_device.Ring] = {}
        begins, start, batch = [], 0, key.shape[0]
        for group, (members, limit) in enumerate(zip(retention.key_heads, retention.limits or (), strict=True)):
            kept, again = min(limit, self.capacity), limit <= self.capacity
            size = kept * (1 + again)
            for at, head in enumerate(members):
                step, number = len(members) * size, group if at == 0 else -1
                rings[head] = on_device.Ring(start + at * size, step, kept, again, number)
            begins.append((start, batch, len(members), size))
            start += batch * len(members) * size
        self._held = key.new_zeros(start, key.shape[3]), value.new_zeros(start, value.shape[3])
        self._rings = torch.tensor([rings[head] for head in sorted(rings)], device=key.device)
        keys, values = (
            [x[begin : begin + b * n * size].view(b, n, size, -1) for begin, b, n, size in begins] for x in self._held
        )
        self.tensors = list(zip(keys, values, strict=True))
