"""ReachCache: keeps, per head, only the keys within its certified reach, and counts the forgotten keys.

A head of slope m whose scores never exceed U needs no key at |i − j| ≥ reach (`alibi_attn/reach.py`): steep heads decode in
constant memory and time indefinitely, and outputs equal full attention within the tolerance. Shapes as in
`attention/call/spec.py`. The bound U comes from QK-normalization or from the caller; see `ALiBiAttention.reach_cache`.
"""

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from alibi_attn.attention.call.spec import index_of, query_heads
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache_checks import check_format, check_pair
from alibi_attn.nn.static_cache import StaticReachCache, runs_of


class CachesOfHeads:
    """Per-head caches that forget automatically: the code shared by `ReachCache` and `GatedReachCache`.

    Args:
        key_heads: the key heads of every inner cache.
        num_heads: H.
        score_bound, tolerance: U and ε, which determine when keys may be dropped.
    """

    FORMAT = 1  # format number of a pickle; the inner caches have their own
    slopes: Sequence[float] = ()  # those that determine which keys may be dropped; empty = unknown

    def __init__(self, key_heads: list[list[int]], num_heads: int, *, score_bound: float, tolerance: float) -> None:
        self.key_heads = key_heads
        self.query_heads = [query_heads(members, num_heads // sum(map(len, key_heads))) for members in key_heads]
        self.score_bound, self.tolerance = score_bound, tolerance
        self._caches = [KVCache() for _ in key_heads]
        self._seen, self._longest_key = 0, 0.0

    def __len__(self) -> int:
        return self._seen

    def __getstate__(self) -> dict[str, object]:
        return {"format": self.FORMAT, **vars(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        check_format(type(self).__name__, state, reads=self.FORMAT)
        vars(self).update({name: value for name, value in state.items() if name != "format"})

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens that each key head holds for later queries, [K]."""
        return tuple(len(cache) for cache in self._caches)

    @property
    def forgotten(self) -> tuple[int, ...]:
        """Tokens that each key head has dropped, [K]."""
        return tuple(self._seen - kept for kept in self.kept)

    @property
    def nbytes(self) -> int:
        """Memory of the cached tensors, including spare capacity."""
        return sum(cache.nbytes for cache in self._caches)

    def check_bound(self, query: Tensor, key: Tensor, scale: float, slopes: Tensor) -> None:
        """Raises ValueError if a query [B, H, T, D] and a key seen so far could score above the bound, or slopes [H] fell."""
        if torch.compiler.is_compiling() or query.device.type != "cpu" or not query.numel():
            return
        if self.slopes and any(now < then for now, then in zip(slopes.tolist(), self.slopes, strict=True)):
            raise ValueError(
                f"the slopes are {slopes.tolist()} but this cache forgot keys for {list(self.slopes)}; create a new one after "
                "slopes fall"
            )
        longest_query, longest_key = (float(x.detach().float().norm(dim=-1).max()) for x in (query, key))
        if self._notice_changes():
            kept = [cache.key.detach().float().norm(dim=-1).max() for cache in self._caches if len(cache)]
            longest_key = max([longest_key, *map(float, kept)])
        longest_key = max(longest_key, self._longest_key)  # NaN stays NaN in this order
        largest = abs(scale) * longest_query * longest_key
        if not largest <= self.score_bound:
            raise ValueError(
                f"scores may reach {largest:.6g} but this cache forgot keys for scores up to {self.score_bound:.6g}; "
                "create it with a larger score_bound, and a new one after the weights change"
            )
        self._longest_key = longest_key

    def _notice_changes(self) -> bool:
        return sum(cache.notice_changes() for cache in self._caches) > 0

    def _check_pair(self, key: Tensor, value: Tensor) -> None:
        check_pair(key, value, None)  # here too, because an inner cache sees only its own heads
        heads = sum(map(len, self.key_heads))
        if key.shape[1] != heads:
            raise ValueError(f"key has shape {list(key.shape)} but must be [B, K, T, D] with K = {heads}")

    def _checked_length(self, length: int) -> int:
        length = operator.index(length)
        if not 0 <= length <= self._seen:
            raise ValueError(f"length is {length} but the cache has seen {self._seen} tokens: crop to 0 … {self._seen}")
        return length

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Same as `KVCache.reorder`."""
        for cache in self._caches:
            cache.reorder(indices)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(seen {self._seen} tokens; key heads keep {list(self.kept)}, forgot {list(self.forgotten)}; "
            f"{self.nbytes} bytes; at most {self.tolerance:.1e} of any query's softmax mass is forgotten)"
        )


class ReachCache(CachesOfHeads):
    """The keys and values that later queries can still need; `len(cache)` is the number of tokens seen.

    Key heads whose reach rounds up to the same power of two share one inner cache, so that decoding makes one call per
    group. A key head shared by several query heads keeps the widest of their reaches.

    Args:
        reach: [H], one per query head, of `ALiBiAttention.static_reach`; it counts the query itself.
        num_kv_heads: K; default H.
        score_bound: U, for which the reach was computed. `ALiBiAttention` raises an error if queries and keys exceed it
            (if it can read them: on the CPU, not compiled).
        tolerance: ε, for which the reach was computed.
        slopes: [H], for which the reach was computed. `ALiBiAttention` raises an error if one of them has become smaller.
        sinks: the number of first keys that are never forgotten, for layers whose window does not hide them.

    Raises:
        ValueError: a reach is below 1, or num_kv_heads does not divide the number of heads.

    >>> cache = ReachCache([2, 2, 100, 100], score_bound=3.0, tolerance=1e-6)
    >>> with torch.no_grad():
    ...     for _ in range(50):
    ...         parts = cache.append(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8))
    >>> cache.kept, cache.forgotten
    ((1, 1, 50, 50), (49, 49, 0, 0))
    """

    sinks: int = 0
    _first: KVCache | None = None  # the sinks of all key heads

    def __init__(
        self,
        reach: Sequence[int] | Tensor,
        *,
        score_bound: float,
        tolerance: float,
        num_kv_heads: int | None = None,
        slopes: Sequence[float] | None = None,
        sinks: int = 0,
    ) -> None:
        per_head = [operator.index(r) for r in (reach.tolist() if isinstance(reach, Tensor) else reach)]
        heads = len(per_head) if num_kv_heads is None else operator.index(num_kv_heads)
        if not per_head or min(per_head) < 1:
            raise ValueError(f"reach is {per_head} but must be at least 1 per head: it counts the query itself")
        if heads < 1 or len(per_head) % heads:
            raise ValueError(f"num_kv_heads is {heads} but must divide the {len(per_head)} heads of reach")
        widest = [max(row) for row in np.reshape(per_head, (heads, -1)).tolist()]
        size = [(reach - 1).bit_length() for reach in widest]
        key_heads = [[h for h in range(heads) if size[h] == group_size] for group_size in sorted(set(size))]
        super().__init__(key_heads, len(per_head), score_bound=score_bound, tolerance=tolerance)
        self._limits = [max(widest[h] for h in members) for members in key_heads]
        self._num_kv_heads = heads
        if sinks:
            self.sinks, self._first = sinks, KVCache()
        if slopes is not None:  # else a pickle holds what it held before caches knew their slopes
            self.slopes = slopes

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The first query head of each group and the one after its last; empty if some group is not a run of heads."""
        return runs_of(self.query_heads)

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens that each key head holds for later queries, [K]."""
        groups = zip(self.key_heads, self._caches, self._limits, strict=True)
        kept = {head: min(len(cache), limit - 1) for members, cache, limit in groups for head in members}
        return tuple(kept[head] for head in range(self._num_kv_heads))

    @property
    def nbytes(self) -> int:
        """Memory of the cached tensors, including spare capacity."""
        return super().nbytes + (0 if self._first is None else self._first.nbytes)

    def sinks_of(self, group: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of a group of key heads, [B, members, at most `sinks`, D]."""
        assert self._first is not None
        members = index_of(self.key_heads[group])
        return self._first.key[:, members], self._first.value[:, members]

    def append(self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None) -> list[tuple[Tensor, Tensor]]:
        """Add key and value, [B, K, T, D]; returns the keys and values that these T queries need, one pair for each group of
        key heads in `key_heads`, [B, members, S', D], up to the newest one; without those of `sinks_of`.

        Raises:
            ValueError: the layer differs, or shapes, dtype or device do not match the cache.
        """
        self._check_pair(key, value)
        parts = []
        for members, limit, cache in zip(self.key_heads, self._limits, self._caches, strict=True):
            cache.forget(limit - 1)  # the first new query needs the most keys
            heads = index_of(members)
            of_group = (key, value) if len(self.key_heads) == 1 else (key[:, heads], value[:, heads])
            parts.append(cache.append(*of_group, layer=layer))
        self._seen += key.shape[2]
        if self._first is None:
            return parts
        more = self.sinks - len(self._first)
        if more > 0:
            self._first.append(key[:, :, :more], value[:, :, :more], layer=layer)
        held = [max(len(self._first) - self._seen + keys.shape[2], 0) for keys, _ in parts]
        return [(keys[:, :, n:], values[:, :, n:]) for n, (keys, values) in zip(held, parts, strict=True)]

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Same as `KVCache.reorder`."""
        super().reorder(indices)
        if self._first is not None:
            self._first.reorder(indices)

    def static(self, capacity: int) -> StaticReachCache:
        """An empty cache of the same reach for steps that a CUDA graph replays; heads keep at most `capacity` keys."""
        return StaticReachCache(self.key_heads, self._limits, sum(map(len, self.query_heads)), capacity)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens: undoes a draft, unless keys it needs were forgotten.

        Raises:
            ValueError: `length` exceeds the tokens seen, or needed keys were forgotten.
        """
        length = self._checked_length(length)
        back = self._seen - length
        missing = [
            max(len(cache) - back, 0) < min(length, limit - 1)
            for cache, limit in zip(self._caches, self._limits, strict=True)
        ]
        if length and any(missing):
            raise ValueError(
                f"cropped to {length} of {self._seen} tokens the cache would need keys that it has forgotten; "
                "undo drafts before the next append, or crop(0) to empty it"
            )
        for cache in self._caches:
            cache.take_back(len(cache) if length == 0 else min(back, len(cache)))
        if self._first is not None:
            self._first.crop(min(length, len(self._first)))
        self._seen = length
        self._longest_key = self._longest_key if length else 0.0
