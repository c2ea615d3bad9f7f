"""KVCache: the keys and values that one attention layer keeps while decoding; all of them, or a stream of the latest.

Next: `reach_cache.py`, which forgets with a proof.
"""

import copy
import operator
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.nn import cache_checks
from alibi_attn.nn.cache_file import CacheFile
from alibi_attn.nn.cache_header import Mode, check_new, fingerprint
from alibi_attn.nn.kept_norms import KeptNorms, Pair, may_write, normal_tensors, with_room

FORMAT = 1  # format number of a pickle


class KVCache:
    """Keys and values of the positions seen so far, [B, K, S, D]; `len(cache)` is S.

        outputs of layer(x[:, :n], cache=cache), layer(x[:, n:], cache=cache) = outputs of layer(x), for any chunks

    Use it to decode with `ALiBiAttention` and blocks; models of transformers take an `ALiBiCache`. `layer.reach_cache()` needs
    less memory, and forgets. ALiBi adds nothing to keys, so cropping, reordering and changing slopes never invalidate a cache.

    A common mistake: one cache for several layers (each needs its own), or decoding without `torch.no_grad()`: then every append
    copies all keys, so that the loss of a later chunk reaches earlier ones. Otherwise it writes into room that doubles when full.

    `copy.deepcopy` forks a cache, gradients included. A pickle holds the tensors that later tokens need,
    without gradients or spare capacity, and a format number that other versions check. Either copy belongs to the layer
    that appends to it next.

    With `max_tokens` the cache streams: once it is full, each new token replaces the oldest one that is not among the
    first `sinks`, and distances are counted inside the cache. This differs from full attention (Xiao et al. 2023,
    arXiv:2309.17453, sec. 3.2, StreamingLLM's rule for ALiBi) but does not depend on how the sequence is split into chunks.

    With a `path` the keys and values are in a memory-mapped file, on Linux and macOS (`cache_file.py`): memory then follows the
    keys that queries read, and `KVCache.open(path)` continues later, also after the process was killed. The same bits result as
    in memory. A copy or a pickle of such a cache is in memory.

    Args:
        path: a new file; None = memory. Gradients, forget gates and streams need memory.
        max_tokens: the largest number of tokens to keep; None = all.
        sinks: the number of first tokens that are never forgotten (models attend to them); only with `max_tokens`.

    >>> from alibi_attn import ALiBiAttention
    >>> layer, cache = ALiBiAttention(64, 8), KVCache()
    >>> with torch.no_grad():
    ...     steps = [layer(x, cache=cache) for x in torch.randn(3, 1, 1, 64)]
    >>> len(cache)
    3
    """

    def __init__(self, path: str | Path | None = None, *, max_tokens: int | None = None, sinks: int = 4) -> None:
        cache_checks.check_stream(max_tokens, sinks, in_file=path is not None)
        self.max_tokens, self.sinks = max_tokens, sinks
        self.forgotten = 0  # tokens that were dropped
        self._start = 0  # index of the first valid position in the tensors below
        self._tensors: Pair | None = None  # keys and values
        self._length = 0
        self._has_room = False  # the tensors above were allocated here and may be written
        self._gates: KVCache | None = None  # layers with forget gates: ln f as keys [B, H, S, 1], without values
        self._kept = KeptNorms()
        self._layer: weakref.ref[nn.Module] | None = None
        self.path = None if path is None else Path(path)
        self._file: CacheFile | None = None
        self._weights: str | None = None  # fingerprint of the layer that writes to the file
        self.part = ""  # which part of a larger cache the file is
        if path is not None:
            check_new(Path(path))

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
        cache._attach(CacheFile.open(cache.path, mode))
        return cache

    def save(self, path: str | Path, *, part: str = "") -> None:
        """Writes a copy to a new file, which `open` reads; `part` says which part of a larger cache it is.

        Raises:
            OSError: the file cannot be written.
            ValueError: the cache is empty, streams, has gates, or is not on the CPU; or the file exists.
        """
        cache_checks.check_savable(self._gates is None and self.max_tokens is None and not self.forgotten)
        layer = None if self._layer is None else self._layer()
        weights, release = ("", None) if self._file is None else (self._file.fingerprint, self._file.release)
        weights = weights if layer is None else fingerprint(layer)
        check_new(Path(path))
        CacheFile.write(Path(path), *self._filled(), fingerprint=weights, part=part, release=release)

    def verify(self) -> None:
        """Compares all keys and values in the file with their checksums, which `open` does not read.

        Raises:
            ValueError: some differ, or the cache has no file.
        """
        if self.path is None:
            raise ValueError("the cache is in memory and has no checksums; verify() is for KVCache.open(path)")
        if self._file is not None:
            self._file.verify()

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        if self._tensors is None:
            return "KVCache(empty)"
        stream = "" if self.max_tokens is None else f", max_tokens={self.max_tokens}, forgotten={self.forgotten}"
        place = "" if self._file is None else f" in {self.path}"
        return f"KVCache({self._length} tokens, {cache_checks.described(self.key)}, {self.nbytes} bytes{place}{stream})"

    @property
    def key(self) -> Tensor:
        """The keys, [B, K, S, D], a view. After a write into it the norms are computed again; a file must not be changed."""
        return self._filled()[0]

    @property
    def value(self) -> Tensor:
        """The values, [B, K, S, D], a view, as `key`."""
        return self._filled()[1]

    @property
    def log_fgate(self) -> Tensor | None:
        """The logarithms of the forget gates, [B, H, S], a view; None for a layer without them."""
        return None if self._gates is None else self._gates.key[..., 0]

    @property
    def nbytes(self) -> int:
        """Memory of the keys, values and gates, including spare capacity; of a cache in a file, the bytes stored there."""
        if self._file is not None:
            return self._file.nbytes
        own = sum(tensor.untyped_storage().nbytes() for tensor in self._tensors or ())
        return own + (0 if self._gates is None else self._gates.nbytes)

    @property
    def norms(self) -> Norms:
        """Upper bounds of the norms of keys and values in each tile, computed once so that decoding does not read all keys."""
        self.notice_changes()
        return self._kept.norms_of(*self._filled())

    def notice_changes(self) -> bool:
        """Whether the tensors were changed from outside since the cache was empty; raises ValueError if they are in a file."""
        return self._kept.notice(self._tensors, self.path) or (self._gates is not None and self._gates.notice_changes())

    def assign(self, key: Tensor, value: Tensor) -> None:
        """Replaces all keys and values, [B, K, S, D], with these tensors, without a copy.

        Raises:
            ValueError: shapes do not match, or the cache has gates, `max_tokens` or a file.
        """
        cache_checks.check_pair(key, value, None)
        cache_checks.check_assignable(self.path is None and self.max_tokens is None and self._gates is None)
        self._replace(key, value)
        self._length, self.forgotten, self._kept = key.shape[2], 0, KeptNorms((key, value), changed=True)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        kept = KeptNorms(changed=self._kept.notice(self._tensors))
        own = {"_layer": None, "path": None, "part": "", "_file": None, "_kept": kept}
        vars(twin).update(vars(self) | own, _gates=copy.deepcopy(self._gates, memo))
        if self._tensors is not None:
            twin._replace(*(tensor.clone() for tensor in self._filled()))
        return twin

    def __getstate__(self) -> dict[str, object]:
        key, value = (None, None) if self._tensors is None else (x.detach().clone() for x in self._filled())
        settings = {"max_tokens": self.max_tokens, "sinks": self.sinks, "forgotten": self.forgotten}
        return {"format": FORMAT, **settings, "key": key, "value": value, "gates": self._gates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache_checks.check_format("KVCache", state, reads=FORMAT)
        KVCache.__init__(self, max_tokens=state["max_tokens"], sinks=state["sinks"])
        self.forgotten, self._gates = state["forgotten"], state["gates"]
        if state["key"] is not None:
            self._replace(state["key"], state["value"])
            self._length = state["key"].shape[2]

    def append(
        self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None, log_fgate: Tensor | None = None
    ) -> Pair:
        """Append key and value, [B, K, T, D]; returns all keys and values, [B, K, S + T, D].

        Args:
            layer: the attention layer that appends; another layer raises.
            log_fgate: [B, H, T], for layers with forget gates: pass it for every token or for none.

        Raises:
            ValueError: the layer differs; shapes, dtype or device do not match the cache; or several tokens
                are appended to a full stream at once (`ALiBiAttention` appends them one at a time).
        """
        self._check(key, value, layer)
        if self.path is not None:
            return self._append_to_file(key, value, layer, log_fgate)
        self.notice_changes()
        self._append_gates(key, log_fgate)
        self._bind(layer)
        new_length = self._length + key.shape[2]
        if self.max_tokens is not None and new_length > self.max_tokens:
            return self._stream(key, value)
        if self._tensors is None:
            if torch.is_grad_enabled() or self.max_tokens is not None or torch.compiler.is_compiling():
                self._replace(key, value)
            else:
                # Otherwise the first token after a prompt would copy all of it, and the input may be a view of a larger tensor.
                self._reserve(2 * new_length, key, value)
        elif torch.is_grad_enabled():
            self._replace(torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2))
        else:
            held = self._length
            for tensor, tokens in zip(self.extend(key.shape[2]), (key, value), strict=True):
                tensor[:, :, held:] = tokens
        self._length = new_length
        self._kept.settle(self._tensors)
        return self._filled()

    @property
    def can_extend(self) -> bool:
        """Whether `extend` works: tokens are held, and none has gates or was forgotten."""
        return self._gates is None and self.max_tokens is None and self._length > 0 and self._start == 0

    def extend(self, count: int) -> Pair:
        """Appends positions that the caller must write, without gradients, then `commit`; returns all keys and values."""
        self.notice_changes()
        if self._file is not None:
            self._file.prepare(count)
            self._tensors = self._file.key, self._file.value
        elif not self._can_hold(self._start + self._length + count):
            self._reserve(2 * (self._length + count), *self._filled())
        self._length += count
        return self._filled()

    def commit(self) -> None:
        """Keeps the positions of `extend` in the file, after the caller wrote them; needed before anything else."""
        if self._file is not None:
            self._file.commit(self._length - self._file.length)
            self._attach(self._file)

    def forget(self, length: int) -> None:
        """Keep only the last `length` positions, and return the memory of most others.

        Raises:
            ValueError: `length` is negative.
        """
        if (length := operator.index(length)) < 0:
            raise ValueError(f"length is {length} but must be at least 0, the positions to keep")
        if (dropped := self._length - length) <= 0:
            return
        if self.path is not None:
            raise ValueError("a cache in a file keeps all tokens; use a cache in memory to forget some")
        self.notice_changes()
        self._start, self._length, self.forgotten = self._start + dropped, length, self.forgotten + dropped
        self._kept.take(None)
        if self._gates is not None:
            self._gates.forget(length)
        if self._has_room and 4 * (length + 16) < self._tensors[0].shape[2]:  # type: ignore[index]
            self._reserve(2 * (length + 16), *self._filled())

    def crop(self, length: int) -> None:
        """Keep the first `length` positions: undoes a speculative draft; 0 empties the cache.

        Raises:
            ValueError: `length` is negative or larger than the cache, or tokens that would be needed
                have been forgotten.
        """
        self.take_back(self._length - cache_checks.checked_crop(length, held=self._length, forgotten=self.forgotten))

    def take_back(self, tokens: int) -> None:
        """Drop the newest `tokens` positions, even if old ones were forgotten."""
        self._length -= tokens
        if self._file is not None and tokens:
            self._file.crop(self._length)
        if self._gates is not None:
            self._gates.take_back(tokens)
        self._kept.crop(self._length)
        if self._length == 0:
            self._tensors = self._gates = None
            self._start, self.forgotten, self._kept = 0, 0, KeptNorms()

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Row b of the batch becomes row `indices[b]`, for beam search.

        Raises:
            TypeError: `indices` are not integers.
            ValueError: not one-dimensional, or (on the CPU) outside the batch.
        """
        if self._tensors is None:
            raise ValueError("the cache is empty and has no batch to reorder; append first")
        key, value = self._tensors
        rows = cache_checks.checked_rows(indices, key)
        if self.path is not None:
            cache_checks.check_order_in_file(rows, key)
            return
        self.notice_changes()
        with normal_tensors():
            self._tensors = key.index_select(0, rows), value.index_select(0, rows)
        if self._gates is not None:
            self._gates.reorder(rows)
        self._kept.reorder(rows)
        self._kept.settle(self._tensors)

    def _append_gates(self, key: Tensor, log_fgate: Tensor | None) -> None:
        gated, filled, streams = self._gates is not None, self._tensors is not None, self.max_tokens is not None
        cache_checks.check_gates(key, log_fgate, gated=gated, filled=filled, streams=streams)
        if log_fgate is not None:
            self._gates = KVCache() if self._gates is None else self._gates
            self._gates.append(log_fgate[..., None], log_fgate[..., None][..., :0])

    def _append_to_file(self, key: Tensor, value: Tensor, layer: nn.Module | None, log_fgate: Tensor | None) -> Pair:
        cache_checks.check_append_to_file(gated=log_fgate is not None)
        assert self.path is not None
        weights = self._weights
        if weights is None:
            weights = "" if layer is None else fingerprint(layer)
            if self._file is not None:
                self._file.check_weights(weights)
        self.notice_changes()
        if self._file is None:
            check_new(self.path)
            self._file = CacheFile.write(self.path, key, value, fingerprint=weights, part=self.part)
        else:
            self._file.append(key, value)
        self._weights = weights
        self._bind(layer)
        self._attach(self._file)
        return self._filled()

    def _attach(self, file: CacheFile) -> None:
        """Takes tensors, norms and length from the file."""
        self._file, self._length, self.part = file, file.length, file.part
        self._tensors = (file.key, file.value) if file.length else None
        self._kept.take(file.norms if file.length else None)
        self._kept.settle(self._tensors)

    def _replace(self, key: Tensor, value: Tensor) -> None:
        self._tensors, self._start, self._has_room = (key, value), 0, False

    def _reserve(self, capacity: int, key: Tensor, value: Tensor) -> None:
        """Copies key and value into new tensors with room for `capacity` tokens."""
        self._replace(with_room(key, capacity), with_room(value, capacity))
        self._has_room = True
        self._kept.settle(self._tensors)

    def _stream(self, key: Tensor, value: Tensor) -> Pair:
        """Drop the oldest token after the sinks and append one: the cache is full."""
        assert self.max_tokens is not None
        if key.shape[2] > 1:
            raise ValueError(
                f"{key.shape[2]} tokens do not fit after {self._length} of at most {self.max_tokens}: "
                "append those that fit, then one at a time"
            )
        self._kept.take(None)
        first = self.sinks + 1 + self._length - self.max_tokens
        held = zip(self._filled(), (key, value), strict=True)
        self._replace(*(torch.cat([old[:, :, : self.sinks], old[:, :, first:], new], dim=2) for old, new in held))
        self._length, self.forgotten = self.max_tokens, self.forgotten + 1
        self._kept.settle(self._tensors)
        return self.key, self.value

    def _filled(self) -> Pair:
        """Keys and values without spare capacity."""
        if self._tensors is None:
            raise ValueError("the cache is empty: it gets keys and values in the first forward pass")
        key, value = self._tensors
        if self._start == 0 and key.shape[2] == self._length:
            return key, value
        filled = slice(self._start, self._start + self._length)
        return key[:, :, filled], value[:, :, filled]

    def _can_hold(self, length: int) -> bool:
        if self._tensors is None or not self._has_room or length > self._tensors[0].shape[2]:
            return False
        return may_write(self._tensors[0])

    def _check(self, key: Tensor, value: Tensor, layer: nn.Module | None) -> None:
        if not (layer is None or self._layer is None or torch.compiler.is_compiling() or self._layer() is layer):
            raise ValueError("this KVCache belongs to another attention layer; make one KVCache() for each layer")
        cache_checks.check_pair(key, value, self._tensors, self._start, self._length)

    def _bind(self, layer: nn.Module | None) -> None:
        if layer is not None and self._layer is None and not torch.compiler.is_compiling():
            self._layer = weakref.ref(layer)
