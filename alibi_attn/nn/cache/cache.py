"""KVCache: the keys and values that one attention layer keeps while decoding.

A storage (`storage.py`, memory that grows or a mapped file; `fixed.py`, a fixed capacity) times a retention (`retention.py`: all
tokens, the latest, those within reach, those that gates have left). `refusals.py` lists what excludes one another.
"""

import copy
import operator
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from alibi_attn.attention.call.transforms import may_read
from alibi_attn.attention.kept import Kept
from alibi_attn.nn.cache import refusals
from alibi_attn.nn.cache.appending import check_append, checked_crop, checked_scores, held, to_all, to_groups, traits
from alibi_attn.nn.cache.file import CacheFile
from alibi_attn.nn.cache.fixed import Fixed
from alibi_attn.nn.cache.header import Mode, check_new, fingerprint
from alibi_attn.nn.cache.refusals import refuse
from alibi_attn.nn.cache.retention import Certified
from alibi_attn.nn.cache.storage import Growing

FORMAT, FORMAT_OF_PARTS = 1, 2  # format numbers of pickles: of one group of heads in memory, and of all other caches


class KVCache:
    """Keys and values of the positions seen so far; `len(cache)` is their number, in a stream that of the tokens kept.

        outputs of layer(x[:, :n], cache=cache), layer(x[:, n:], cache=cache) = outputs of layer(x), for any chunks

    Use it to decode with `ALiBiAttention` and blocks; models of transformers take an `ALiBiCache`. `layer.reach_cache()` makes
    one that needs less memory, and forgets. ALiBi adds nothing to keys, so cropping, reordering and changing slopes never
    invalidate a cache that keeps all tokens.

    A common mistake: one cache for several layers (each needs its own), or decoding without `torch.no_grad()`: then every append
    copies all keys, so that the loss of a later chunk reaches earlier ones. Otherwise it writes into room that doubles when full.

    `copy.deepcopy` forks a cache, gradients included. A pickle holds the tensors that later tokens need,
    without gradients or spare capacity, and a format number that other versions check. Either copy belongs to the layer
    that appends to it next.

    With `max_tokens` the cache streams: once it is full, each new token replaces the oldest one that is not among the
    first `sinks`, and distances are counted inside the cache. This differs from full attention (Xiao et al. 2023,
    arXiv:2309.17453, sec. 3.2, StreamingLLM's rule for ALiBi) but does not depend on how the sequence is split into chunks.

    With a `path` the keys and values are in a memory-mapped file, on Linux and macOS (`file.py`): memory then follows the
    keys that queries read, and `KVCache.open(path)` continues later, also after the process was killed. The same bits result as
    in memory. A copy or a pickle of such a cache is in memory.

    With a `capacity` the tensors and shapes of a step never change, so that a CUDA graph or torch.compile can replay it. Call the
    layer once before capturing a step: the first call allocates. The layer must be causal and have no forget gates; key masks and
    segment ids are [B, capacity]. Gradients must be off. After more than `capacity` tokens all outputs are NaN, unless a reach
    limits what is kept. On a GPU a step without masks, outside torch.compile, reads only the tiles of keys within reach.

    See `docs/caches.md`, also for what excludes one another.

    Args:
        path: a new file; None = memory. Gradients, forget gates and caches that forget need memory.
        max_tokens: the largest number of tokens to keep; None = all.
        sinks: the number of first tokens that are never forgotten (models attend to them); only with `max_tokens`.
        capacity: the largest number of tokens, or with a reach of keys that a head keeps; None = the cache grows.
        retention: what may be forgotten with a proof: `nn.within_reach` or `nn.by_gates`, as `layer.reach_cache()` passes.

    >>> from alibi_attn import ALiBiAttention
    >>> layer, cache = ALiBiAttention(64, 8), KVCache()
    >>> with torch.no_grad():
    ...     steps = [layer(x, cache=cache) for x in torch.randn(3, 1, 1, 64)]
    >>> len(cache)
    3
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        max_tokens: int | None = None,
        sinks: int = 4,
        capacity: int | None = None,
        retention: Certified | None = None,
    ) -> None:
        if max_tokens is not None and not 0 <= operator.index(sinks) < operator.index(max_tokens):
            raise ValueError(
                f"max_tokens is {max_tokens} and sinks {sinks} but sinks must be from 0 to max_tokens − 1: the newest token "
                "needs a place"
            )
        self.max_tokens, self.capacity, self.retention = max_tokens, capacity, retention
        self.sinks = sinks if retention is None else retention.sinks
        self.path = None if path is None else Path(path)
        self.part = ""  # which part of a larger cache the file is
        refuse(*traits(self))
        self.groups: list[Growing] = []  # one per group of heads that keeps the same tokens; empty = no token
        self.fixed = None if capacity is None else Fixed(capacity, retention)
        self.first = Growing()  # the first keys of all heads, within a reach
        self._gone: list[Tensor | None] = []  # ln of the weight of the keys that gates dropped
        self._since = 0  # tokens since gates dropped keys
        self._longest_key = 0.0
        self._layer: weakref.ref[nn.Module] | None = None
        if self.path is not None:
            check_new(self.path)

    @classmethod
    def open(cls, path: str | Path, *, mode: Mode = "r+") -> Self:
        """The cache in a file. Its header and norms are checked; only `verify()` notices a bit flipped in a key or a value.

        Args:
            mode: "r+" continues the file. "c" shares it: any number of processes may open it. Their changes are
                private and never saved.

        Raises:
            OSError: there is no such file.
            ValueError: the file is damaged, has another format, or is open elsewhere.
        """
        cache = cls()
        cache.path = Path(path)
        file = CacheFile.open(cache.path, mode)
        cache.groups, cache.part = [Growing(file=file)], file.part
        return cache

    def save(self, path: str | Path, *, part: str = "") -> None:
        """Writes a copy to a new file, which `open` reads; `part` says which part of a larger cache it is.

        Raises:
            OSError: the file cannot be written.
            ValueError: the cache is empty, forgets, has gates, a fixed capacity, or is not on the CPU; or the file exists.
        """
        gates = [] if self.log_fgate is None else ["forget gates"]
        refuse("saving", *(trait for trait in traits(self) if trait != "path"), *gates)
        layer, file = None if self._layer is None else self._layer(), self.groups[0].file if self.groups else None
        weights = fingerprint(layer) if layer is not None else file.fingerprint if file is not None else ""
        check_new(Path(path))
        CacheFile.write(Path(path), self.key, self.value, fingerprint=weights, part=part, source=file)

    def verify(self) -> None:
        """Compares all keys and values in the file with their checksums, which `open` does not read.

        Raises:
            ValueError: some differ, or the cache has no file.
        """
        if self.path is None:
            raise ValueError("the cache is in memory and has no checksums; verify() is for KVCache.open(path)")
        for group in self.groups:
            if group.file is not None:
                group.file.verify()

    def __len__(self) -> int:
        if self.fixed is not None:
            length = self.fixed.length
            if length is not None and not may_read(length):
                raise ValueError("reading the length would synchronize the device; use cache.fixed.length, a tensor")
            return 0 if length is None else int(length)
        if not self.groups:
            return 0
        return self.groups[0].length if self.retention is None else self.groups[0].seen

    def __repr__(self) -> str:
        if self.fixed is not None:
            return f"KVCache(capacity={self.capacity}, {self.nbytes} bytes)"
        if self.retention is not None:
            return (
                f"KVCache(seen {len(self)} tokens; key heads keep {list(self.kept)}, forgot {list(self.forgotten)}; "
                f"{self.nbytes} bytes; at most {self.retention.tolerance:.1e} of any query's softmax mass is forgotten)"
            )
        if not len(self):
            return "KVCache(empty)"
        stream = "" if self.max_tokens is None else f", max_tokens={self.max_tokens}, forgotten={self.forgotten[0]}"
        place = "" if self.path is None else f" in {self.path}"
        return f"KVCache({len(self)} tokens, {refusals.described(self.key)}, {self.nbytes} bytes{place}{stream})"

    @property
    def key(self) -> Tensor:
        """The keys, [B, K, S, D], a view. After a write into it the norms are computed again; a file must not be changed."""
        return _tensors(self)[0]

    @property
    def value(self) -> Tensor:
        """The values, [B, K, S, D], a view, as `key`."""
        return _tensors(self)[1]

    @property
    def log_fgate(self) -> Tensor | None:
        """The logarithms of the forget gates, [B, H, S], a view; None for a layer without them."""
        gates = [x for group in self.groups[:1] if group.length for x in group.filled()[2:]]
        return gates[0][..., 0] if gates and len(self.groups) == 1 else None

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens that each key head holds for later queries, [K]; empty before the first token, where K is not known."""
        tokens, retention = len(self), self.retention
        if retention is None:
            return (tokens,) * (held(self)[0][0].shape[1] if tokens else 0)
        counts = [group.length for group in self.groups] or [0] * len(retention.key_heads)
        counts = counts if retention.limits is None else [min(tokens, limit - 1) for limit in retention.limits]
        of_heads = {k: n for members, n in zip(retention.key_heads, counts, strict=True) for k in members}
        return tuple(of_heads[head] for head in range(retention.num_kv_heads))

    @property
    def forgotten(self) -> tuple[int, ...]:
        """Tokens that each key head has dropped, [K]."""
        seen = len(self) if self.max_tokens is None else sum(group.seen for group in self.groups)
        return tuple(seen - kept for kept in self.kept)

    @property
    def nbytes(self) -> int:
        """Memory of the cached tensors, including spare capacity; of a cache in a file, the bytes stored there."""
        if self.groups and self.groups[0].file is not None:
            return self.groups[0].file.nbytes
        tensors = [x for pair in (*held(self), self.first.tensors) for x in pair]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    def notice_changes(self) -> bool:
        """Whether the tensors were changed from outside since the cache was empty; raises ValueError if they are in a file."""
        return sum(group.notice() for group in self.groups) > 0

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        own = {name: copy.deepcopy(vars(self)[name], memo) for name in ("groups", "fixed", "first", "_gone")}
        vars(twin).update(vars(self) | own | {"_layer": None, "path": None, "part": ""})
        return twin

    def __getstate__(self) -> dict[str, object]:
        groups = [tuple(x.detach().clone() for x in group.filled()) for group in self.groups]
        if self.capacity is not None or self.retention is not None:
            first = tuple(x.detach().clone() for x in self.first.filled()) or None
            numbers = {name: vars(self)[name] for name in ("_gone", "_since", "_longest_key", "fixed")}
            counts = {"_seen": self.groups[0].seen if self.groups else 0, **numbers}
            return {"format": FORMAT_OF_PARTS, "retention": self.retention, "groups": groups, "sinks": first, **counts}
        key, value, *gates = (groups and groups[0]) or (None, None)
        of_gates = None
        if gates:
            of_gates = KVCache()
            of_gates.groups = [Growing((gates[0], gates[0][..., :0]))]
        forgotten = self.groups[0].dropped if groups else 0
        settings = {"max_tokens": self.max_tokens, "sinks": self.sinks, "forgotten": forgotten}
        return {"format": FORMAT, **settings, "key": key, "value": value, "gates": of_gates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        refusals.check_format("KVCache", state, reads=(FORMAT, FORMAT_OF_PARTS))
        if state["format"] == FORMAT_OF_PARTS:
            KVCache.__init__(self, retention=state["retention"])
            vars(self).update({name: state[name] for name in ("_gone", "_since", "_longest_key", "fixed")})
            self.capacity = None if self.fixed is None else self.fixed.capacity
            self.first, groups, seen = Growing(state["sinks"] or ()), state["groups"], state["_seen"]
        else:
            KVCache.__init__(self, max_tokens=state["max_tokens"], sinks=state["sinks"])
            gates = () if state["gates"] is None else (state["gates"].key,)
            groups = [] if state["key"] is None else [(state["key"], state["value"], *gates)]
            seen = state["forgotten"] + (0 if state["key"] is None else state["key"].shape[2])
        self.groups = [Growing(tensors) for tensors in groups]
        for group in self.groups:
            group.dropped = seen - group.length

    def check(self, given: Sequence[str], *, sinks: int = 0) -> None:
        """Raises ValueError unless the cache supports a call.

        Args:
            given: what a call or layer needs, in the words of `refusals.REFUSED`.
            sinks: the number of first keys that the layer's window does not hide.
        """
        if how := traits(self):
            refuse(*how, *given)
        if (self.retention is not None or self.max_tokens is not None) and self.sinks < sinks:
            raise ValueError(
                f"the layer has {sinks} sinks but this cache keeps {self.sinks} first keys; create it with the layer's "
                "reach_cache(), or KVCache(max_tokens=..., sinks=...)"
            )

    def append(
        self,
        key: Tensor,
        value: Tensor,
        log_fgate: Tensor | None = None,
        *,
        layer: nn.Module | None = None,
        query: Tensor | None = None,
        slopes: Tensor | None = None,
        scale: float | None = None,
    ) -> list[Kept]:
        """Adds key and value, [B, K, T, D]; returns the keys that these T queries need, for `attend`.

        Args:
            log_fgate: [B, H, T], for layers with forget gates: pass it for every token or for none.
            layer: the attention layer that appends; another layer raises.
            query, slopes, scale: [B, H, T, D], [H] and the factor of q·k (default 1/√D), which a cache that forgets with a bound
                compares with it, where it can read them: on the CPU, not compiled.

        Raises:
            ValueError: the layer differs; shapes, dtype or device do not match the cache; scores may exceed the bound, or slopes
                fell; or several tokens are appended to a full stream at once (`ALiBiAttention` appends them one at a time).
        """
        check_append(self, key, value, log_fgate, layer)
        if query is not None and slopes is not None and self.retention is not None:
            self._longest_key = checked_scores(self, self.retention, query, key, slopes, scale)
        new = (key, value) if log_fgate is None else (key, value, log_fgate[..., None])
        if self.fixed is not None:
            kept = self.fixed.append(key, value)
        elif self.retention is not None:
            kept = to_groups(self, self.retention, new)
        else:
            kept = to_all(self, new, layer)
        if layer is not None and self._layer is None and not torch.compiler.is_compiling():
            self._layer = weakref.ref(layer)
        return kept

    def crop(self, length: int | Tensor) -> None:
        """Keep the first `length` positions: undoes a speculative draft; 0 empties the cache.

        With a fixed capacity it may be an integer tensor, which a device does not read: it is limited to the present length.

        Raises:
            ValueError: `length` is negative or larger than the cache, or tokens that would be needed
                have been forgotten.
        """
        if self.fixed is not None:
            self.fixed.crop(length)
            return
        length = checked_crop(self, length)
        back = len(self) - length
        for group in self.groups:
            group.take_back(back if length else group.seen)
        self.first.take_back(max(self.first.length - length, 0))
        self._since = min(self._since, length)
        if length == 0:
            self._gone, self._longest_key = [], 0.0

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Row b of the batch becomes row `indices[b]`, for beam search.

        Raises:
            TypeError: `indices` are not integers.
            ValueError: not one-dimensional, or (on the CPU) outside the batch; the cache is empty, or its rows cannot move.
        """
        if self.fixed is not None:
            refuse(*traits(self), "another order")
        filled = [storage for storage in (*self.groups, self.first) if storage.tensors]
        if not len(self) or not filled:
            raise ValueError("the cache is empty and has no batch to reorder; append first")
        rows = refusals.checked_rows(indices, filled[0].tensors[0])
        if self.path is not None:
            if rows.tolist() != list(range(filled[0].tensors[0].shape[0])):
                refuse(*traits(self), "another order")
            return
        for storage in filled:
            storage.reorder(rows)
        self._gone = [x if x is None else x[rows.to(x.device)] for x in self._gone]


def _tensors(cache: KVCache) -> tuple[Tensor, ...]:
    if cache.fixed is not None or len(cache.groups) > 1:
        raise ValueError("this cache has no keys of all heads up to one length; use what append returns")
    if not len(cache):
        raise ValueError("the cache is empty: it gets keys and values in the first forward pass")
    return cache.groups[0].filled()
