"""KVCache: the keys and values that one attention layer keeps while decoding; all of them, or a stream of the last ones.

Read next: `reach_cache.py`, which forgets with a proof.
"""

import copy
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.decoding import measured_norms
from alibi_attn.nn.pickles import check_format

FORMAT = 1  # of a pickle


class KVCache:
    """Keys and values of the positions seen so far, [B, K, S, D]; `len(cache)` is S.

    One cache belongs to one attention layer, and is the only thing that a forward pass changes. Without gradients
    (`torch.no_grad()`, `torch.inference_mode()`) appending writes into spare room that doubles when it is full, so
    that S single steps copy O(S) keys in all. With gradients enabled every append makes new tensors: slower, and
    right: the loss of a later chunk reaches the keys of an earlier one.

    ALiBi adds nothing to the keys: cropping, reordering and other slopes never make a cache stale.

    `copy.deepcopy` forks a cache, gradients included; a pickle holds what later tokens need, without gradients or spare room,
    and the number of its format: another version refuses what it cannot read. Either belongs to the attention layer that
    appends to it next.

    With `max_tokens` the cache streams: once it is full, each new token takes the place of the oldest that is not one of the
    first `sinks`, and those that stay count as neighbors: a token's distances are those inside the cache. That is another
    computation than full attention (Xiao et al. 2023, sec. 3.2, StreamingLLM's rule for ALiBi), the same however the
    sequence is cut into chunks.

    Args:
        max_tokens: how many tokens are held at most; None = all.
        sinks: how many of the first are never forgotten (attention leans on them); only with `max_tokens`.

    >>> cache = KVCache()
    >>> with torch.no_grad():
    ...     for step in range(3):
    ...         key, value = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> len(cache), key.shape
    (3, torch.Size([1, 2, 3, 4]))

    Source: streaming: Xiao et al. 2023 (arXiv:2309.17453).
    """

    def __init__(self, *, max_tokens: int | None = None, sinks: int = 4) -> None:
        if max_tokens is not None and not 0 <= operator.index(sinks) < operator.index(max_tokens):
            raise ValueError(
                f"max_tokens is {max_tokens} and sinks {sinks} but sinks must be from 0 to max_tokens − 1: "
                "the newest token needs a place"
            )
        self.max_tokens, self.sinks = max_tokens, sinks
        self.forgotten = 0  # tokens that were held once and are no longer
        self._start = 0  # where the tensors below begin to count
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0
        self._has_room = False  # the tensors above are ours to write into
        self._gates: KVCache | None = None  # of a layer with forget gates: ln f as keys [B, H, S, 1], without values
        self._norms: Norms | None = None  # of the whole tiles so far; None where positions have moved
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

    @property
    def log_fgate(self) -> Tensor | None:
        """The logarithms of the forget gates, [B, H, S], a view; None for a layer without them."""
        return None if self._gates is None else self._gates.key[..., 0]

    @property
    def nbytes(self) -> int:
        """Memory of the keys, the values and the gates, with the spare room."""
        own = sum(tensor.untyped_storage().nbytes() for tensor in (self._key, self._value) if tensor is not None)
        return own + (0 if self._gates is None else self._gates.nbytes)

    @property
    def norms(self) -> Norms:
        """How long the keys and values are at most, tile by tile: read once each, so that decoding need not read them again."""
        if self._norms is None:
            self._norms = measured_norms(self.key, self.value)
        elif self._length - self._norms.covered >= TILE:
            self._norms = self._norms.extended(self.key, self.value, measured_norms)
        return self._norms

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        vars(twin).update(self._filled_only())
        return twin

    def __getstate__(self) -> dict[str, object]:
        filled = self._key is not None
        return {
            "format": FORMAT,
            "max_tokens": self.max_tokens,
            "sinks": self.sinks,
            "forgotten": self.forgotten,
            "key": self.key.detach().clone() if filled else None,
            "value": self.value.detach().clone() if filled else None,
            "gates": self._gates,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_format("KVCache", state, reads=FORMAT)
        KVCache.__init__(self, max_tokens=state["max_tokens"], sinks=state["sinks"])
        self._key, self._value, self.forgotten = state["key"], state["value"], state["forgotten"]
        self._length = 0 if self._key is None else self._key.shape[2]
        self._gates = state["gates"]

    def append(
        self, key: Tensor, value: Tensor, *, layer: nn.Module | None = None, log_fgate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add key and value, [B, K, T, D], behind what is there; returns all keys and all values, [B, K, S + T, D].

        Args:
            layer: the attention layer that appends; a second one is refused.
            log_fgate: [B, H, T], of a layer with forget gates: with every token, or with none.

        Raises:
            ValueError: another layer; shapes, dtype or device that do not fit what the cache holds; or several tokens
                at once that a full stream cannot hold (each would forget others; `ALiBiAttention` appends them singly).
        """
        self._check(key, value, layer)
        self._append_gates(key, log_fgate)
        new_length = self._length + key.shape[2]
        if self.max_tokens is not None and new_length > self.max_tokens:
            return self._stream(key, value)
        if torch.is_grad_enabled() or (
            self._key is None and (self.max_tokens is not None or torch.compiler.is_compiling())
        ):
            if self._key is None or self._value is None:
                self._replace(key, value)
            else:
                self._replace(torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2))
        elif self._key is None or self._value is None:
            # With room from the beginning: the first token after a prompt would copy all of it, and what comes may be a view
            # that keeps more than itself alive.
            self._replace(_with_room(key, 2 * new_length), _with_room(value, 2 * new_length))
            self._has_room = True
        else:
            if not self._can_hold(self._key, self._start + new_length):
                self._replace(_with_room(self.key, 2 * new_length), _with_room(self.value, 2 * new_length))
                self._has_room = True
            end = self._start + self._length
            self._key[:, :, end : end + key.shape[2]] = key
            self._value[:, :, end : end + key.shape[2]] = value
        self._length = new_length
        return self.key, self.value

    def forget(self, length: int) -> None:
        """Keep the last `length` positions only; fewer than that are kept as they are.

        Raises:
            ValueError: `length` is negative.
        """
        length = operator.index(length)
        if length < 0:
            raise ValueError(f"length is {length} but must be at least 0, the positions to keep")
        dropped = max(self._length - length, 0)
        if dropped:
            self._norms = None
        self.forgotten += dropped
        self._start += dropped
        self._length -= dropped
        if self._gates is not None:
            self._gates.forget(length)

    def crop(self, length: int) -> None:
        """Keep the first `length` positions: takes back a speculative draft, or with 0 empties the cache.

        Raises:
            ValueError: `length` is negative or more than the cache holds, or the tokens that would now be among the last
                are forgotten.
        """
        length = operator.index(length)
        if not 0 <= length <= self._length:
            raise ValueError(
                f"length is {length} but the cache holds {self._length} positions: crop to 0 … {self._length}"
            )
        if self.forgotten and 0 < length < self._length:
            raise ValueError(
                f"the cache has forgotten {self.forgotten} tokens, and cropped to {length} it would lack some that a "
                "cache of that length holds; crop(0) empties it"
            )
        self.take_back(self._length - length)

    def take_back(self, tokens: int) -> None:
        """Drop the newest `tokens` positions, whatever was forgotten of the oldest."""
        self._length -= tokens
        if self._gates is not None:
            self._gates.take_back(tokens)
        if self._norms is not None:
            self._norms = self._norms.cropped(self._length)
        if self._length == 0:
            self._key = self._value = self._norms = self._gates = None
            self._start = self.forgotten = 0

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
        if self._gates is not None:
            self._gates.reorder(rows)
        if self._norms is not None:
            self._norms = self._norms.reordered(rows)

    def _append_gates(self, key: Tensor, log_fgate: Tensor | None) -> None:
        if (log_fgate is None) != (self._gates is None) and self._length:
            held = "no gates" if self._gates is None else "gates"
            raise ValueError(f"the cache holds keys with {held}: log_fgate comes with every token, or with none")
        if log_fgate is None:
            return
        if self.max_tokens is not None:
            raise ValueError(
                "a cache with max_tokens would lose the gates between those that stay; use KVCache(), which keeps all"
            )
        if log_fgate.ndim != 3 or log_fgate.shape[::2] != (key.shape[0], key.shape[2]):
            raise ValueError(
                f"log_fgate has shape {list(log_fgate.shape)} but must be [B, H, T] beside key's {list(key.shape)}"
            )
        self._gates = KVCache() if self._gates is None else self._gates
        self._gates.append(log_fgate[..., None], log_fgate[..., None][..., :0])

    def _replace(self, key: Tensor, value: Tensor) -> None:
        self._key, self._value, self._start, self._has_room = key, value, 0, False

    def _stream(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The cache is full: the oldest token behind the sinks goes."""
        assert self.max_tokens is not None
        if key.shape[2] > 1:
            raise ValueError(
                f"{key.shape[2]} tokens do not fit behind {self._length} of at most {self.max_tokens}: "
                "append those that fit, then one at a time"
            )
        self._norms = None
        first = self.sinks + 1 + self._length - self.max_tokens
        self._replace(
            torch.cat([self.key[:, :, : self.sinks], self.key[:, :, first:], key], dim=2),
            torch.cat([self.value[:, :, : self.sinks], self.value[:, :, first:], value], dim=2),
        )
        self._length, self.forgotten = self.max_tokens, self.forgotten + 1
        return self.key, self.value

    def _filled(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise ValueError("the cache is empty: it has keys and values after the first forward pass")
        whole = self._start == 0 and tensor.shape[2] == self._length
        return tensor if whole else tensor[:, :, self._start : self._start + self._length]

    def _filled_only(self) -> dict[str, object]:
        """The attributes of a copy: its own keys and values, the spare room and the layer left behind."""
        state: dict[str, object] = {**vars(self), "_layer": None}
        if self._key is not None:
            state |= {"_key": self.key.clone(), "_value": self.value.clone(), "_start": 0, "_has_room": False}
        if self._gates is not None:
            state["_gates"] = copy.deepcopy(self._gates)
        return state

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
