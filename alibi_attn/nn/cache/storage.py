"""Growing: tensors of tokens that grow, in memory or in a mapped file, and the norms of their keys and values.

torch counts the writes to a tensor and to all views of it (`_version`), so that norms are dropped when someone else writes to the
keys or values. Writes to an inference tensor, and those through `.data`, numpy or DLPack, are not counted. Read next: `cache.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run.decoding import measured_norms
from alibi_attn.nn.cache.file import CacheFile


class Growing:
    """Keys [B, K, S, D], values [B, K, S, D] and, for layers with gates, ln f [B, H, S, 1], of the same tokens.

    Args:
        tensors: used without a copy.
        file: holds the keys and values instead of memory.
        changed: whether they were written to or replaced from outside.

    Attributes:
        length: the number of tokens.
        dropped: how many older ones were dropped.
    """

    def __init__(self, tensors: Sequence[Tensor] = (), *, file: CacheFile | None = None, changed: bool = False) -> None:
        self.tensors, self.file, self.changed = tuple(tensors) if file is None else file.tensors, file, changed
        self.start, self.dropped = 0, 0
        self.length = file.length if file is not None else tensors[0].shape[2] if tensors else 0
        self._has_room = False  # the tensors were allocated here and may be written
        self._norms: Norms | None = None if file is None else file.norms
        self._versions = _versions(self.tensors)  # after the last write by the cache; None if they are unknown

    @property
    def seen(self) -> int:
        """The number of tokens since it was empty."""
        return self.dropped + self.length

    def filled(self) -> tuple[Tensor, ...]:
        """The tensors without spare capacity."""
        if not self.tensors or (self.start == 0 and self.tensors[0].shape[2] == self.length):
            return self.tensors
        tokens = slice(self.start, self.start + self.length)
        return tuple(tensor[:, :, tokens] for tensor in self.tensors)

    def append(self, new: tuple[Tensor, ...], *, with_room: bool = True) -> tuple[Tensor, ...]:
        """Adds tokens: in place if no gradients are needed, else in new tensors. Returns all tensors, as `filled`.

        Args:
            with_room: allocate more than is needed, so that later tokens need no copy.
        """
        count = new[0].shape[2]
        if self.file is None and not (self.length and with_room and not torch.is_grad_enabled()):
            self.notice()
            if not with_room or torch.is_grad_enabled() or torch.compiler.is_compiling():
                pairs = zip(self.filled(), new, strict=True)
                self._replace([torch.cat(pair, 2) for pair in pairs] if self.length else new)
                self.length += count
                return self.tensors
            # `extend` copies it: the input may be a view of a larger tensor, and the next token needs room.
            self._replace([x[:, :, :0] for x in new])
        filled = self.extend(count)
        for tensor, tokens in zip(filled, new, strict=True):
            tensor[:, :, self.length - count :] = tokens
        self.commit()
        return filled

    def extend(self, count: int) -> tuple[Tensor, ...]:
        """Adds positions that the caller must write, without gradients, then `commit`; returns all tensors."""
        self.notice()
        if self.file is not None:
            self.length = self.file.length  # less if a call was interrupted before `commit`
            self.file.prepare(count)
            self.tensors = self.file.tensors
        else:
            fits = self._has_room and self.start + self.length + count <= self.tensors[0].shape[2]
            # Inference mode cannot be queried while tracing; an inference tensor can be changed in inference mode only.
            any_tensor = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
            if not fits or (not any_tensor and self.tensors[0].is_inference()):
                self._reserve(2 * (self.length + count))
        self.length += count
        return self.filled()

    def commit(self) -> None:
        """Keeps the positions of `extend`, after the caller wrote them."""
        if self.file is not None:
            self.file.commit(self.length - self.file.length)
            self._norms = self.file.norms
        self._versions = _versions(self.tensors)

    def take_back(self, tokens: int) -> None:
        """Drops the newest tokens."""
        seen = self.seen - tokens
        self.dropped = min(self.dropped, seen)
        self.length = seen - self.dropped
        if self._norms is not None:
            self._norms = self._norms.cropped(self.length)
        if self.length == 0:
            self.start, self.changed, self._norms, self._versions = 0, False, None, None
            self.tensors = () if self.file is None else self.tensors
        if self.file is not None and tokens:
            self.file.crop(self.length)

    def drop(self, tokens: int) -> None:
        """Drops the oldest tokens, and returns the memory of most."""
        self.notice()
        self.start, self.length, self._norms = self.start + tokens, self.length - tokens, None
        self.dropped += tokens
        if self._has_room and 4 * (self.length + 16) < self.tensors[0].shape[2]:
            self._reserve(2 * (self.length + 16))

    def replace_oldest(self, sinks: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Adds tokens and drops as many, the oldest after the first `sinks`; returns all tensors."""
        first, self._norms = sinks + new[0].shape[2], None
        pairs = zip(self.filled(), new, strict=True)
        self._replace([torch.cat([old[:, :, :sinks], old[:, :, first:], x], 2) for old, x in pairs])
        self.dropped += new[0].shape[2]
        return self.tensors

    def reorder(self, rows: Tensor) -> None:
        """Row b of the batch becomes the former row `rows[b]`."""
        self.notice()
        with normal_tensors():
            self.tensors = tuple(tensor.index_select(0, rows) for tensor in self.tensors)
        if self._norms is not None:
            self._norms = self._norms.reordered(rows)
        self._versions = _versions(self.tensors)

    def notice(self) -> bool:
        """Whether someone else has written to the tensors since they were empty; then their norms are dropped.

        Raises:
            ValueError: the tensors are in a file, whose checksums are then wrong.
        """
        if self._was_changed() and self.file is not None:
            raise ValueError(
                f"keys or values of {self.file.path} were changed in place, so its norms and checksums are wrong; change a copy "
                "(copy.deepcopy) instead, and crop(0) or read the text again"
            )
        return self.changed

    def norms(self) -> Norms:
        """Upper bounds of the norms of keys and values in each whole tile, computed once."""
        self.notice()
        if self._norms is None or self.length - self._norms.covered >= TILE:
            key, value, *_ = self.filled()
            known = self._norms
            self._norms = measured_norms(key, value) if known is None else known.extended(key, value, measured_norms)
        return self._norms

    def __deepcopy__(self, memo: dict[int, object]) -> "Growing":
        """In memory, with gradients."""
        twin = Growing([tensor.clone() for tensor in self.filled()], changed=self._was_changed())
        twin.dropped = self.dropped
        return twin

    def _was_changed(self) -> bool:
        if not torch.compiler.is_compiling() and self.tensors:
            versions = _versions(self.tensors)
            if versions is None or versions != self._versions:
                self.changed = self.changed or (versions is not None and self._versions is not None)
                self._norms, self._versions = None, versions
        return self.changed

    def _replace(self, tensors: Sequence[Tensor], *, has_room: bool = False) -> None:
        self.tensors, self.start, self._has_room = tuple(tensors), 0, has_room
        self._versions = _versions(self.tensors)

    def _reserve(self, capacity: int) -> None:
        """Copies the tensors into new ones with room for `capacity` tokens, of which the rest is not initialized."""
        filled = self.filled()
        with normal_tensors():
            larger = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in filled]
        for target, source in zip(larger, filled, strict=True):
            target[:, :, : source.shape[2]] = source
        self._replace(larger, has_room=True)


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Inside, new tensors are not inference tensors, even under `torch.inference_mode()`."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """How often each tensor was written to; None if torch does not count, and for no tensors."""
    if torch.compiler.is_compiling() or not tensors:
        return None
    found = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return None if None in found else tuple(found)  # type: ignore[arg-type]
