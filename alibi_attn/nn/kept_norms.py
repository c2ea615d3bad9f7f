"""The norms that a cache keeps, which are dropped when someone else writes to its keys or values. Read next: `cache.py`.

torch counts the writes to a tensor and to all views of it (`_version`), but not those to an inference tensor. Writes through
`.data`, numpy or DLPack are not counted either.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.decoding import measured_norms

Pair = tuple[Tensor, Tensor]


class KeptNorms:
    """The norms of the whole tiles of a cache. They are used only if every write since then was the cache's own.

    Attributes:
        changed: whether a write by someone else, or an assignment, was noticed since the cache was empty.
    """

    def __init__(self, tensors: Pair | None = None, *, changed: bool = False) -> None:
        self.changed = changed
        self._norms: Norms | None = None
        self._versions: tuple[int, ...] | None = None  # after the last write by the cache; None if they are unknown
        self.settle(tensors)

    def notice(self, tensors: Pair | None, path: Path | None = None) -> bool:
        """Drops the norms if someone else wrote to the tensors. Returns `changed`.

        Args:
            path: of the file that holds them, if there is one.

        Raises:
            ValueError: the tensors were changed and are in a file, whose checksums are then wrong.
        """
        if torch.compiler.is_compiling() or tensors is None:
            return self.changed
        versions = _versions(tensors)
        if versions is None or versions != self._versions:
            self.changed = self.changed or (versions is not None and self._versions is not None)
            self._norms, self._versions = None, versions
        if self.changed and path is not None:
            raise ValueError(
                f"keys or values of {path} were changed in place, so its norms and checksums are wrong; change a copy "
                "(copy.deepcopy) instead, and crop(0) or read the text again"
            )
        return self.changed

    def settle(self, tensors: Pair | None) -> None:
        """Takes the present version as the cache's own, after one of its writes."""
        self._versions = None if tensors is None else _versions(tensors)

    def norms_of(self, key: Tensor, value: Tensor) -> Norms:
        """The norms of these keys and values, [B, K, S, D], all that the cache holds; call `notice` before."""
        if self._norms is None:
            self._norms = measured_norms(key, value)
        elif key.shape[2] - self._norms.covered >= TILE:
            self._norms = self._norms.extended(key, value, measured_norms)
        return self._norms

    def take(self, norms: Norms | None) -> None:
        """Replaces the norms; None = unknown."""
        self._norms = norms

    def crop(self, length: int) -> None:
        """Keeps those of the first `length` positions."""
        if self._norms is not None:
            self._norms = self._norms.cropped(length)

    def reorder(self, rows: Tensor) -> None:
        """Row b of the batch becomes the former row `rows[b]`."""
        if self._norms is not None:
            self._norms = self._norms.reordered(rows)


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Inside, new tensors are not inference tensors, even under `torch.inference_mode()`."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def with_room(source: Tensor, capacity: int) -> Tensor:
    """A copy, [B, K, capacity, D], of a tensor [B, K, S, D] with S ≤ capacity; the rest is not initialized."""
    with normal_tensors():
        target = source.new_empty(*source.shape[:2], capacity, source.shape[3])
    target[:, :, : source.shape[2]] = source
    return target


def may_write(tensor: Tensor) -> bool:
    """Whether torch allows writes to it here: an inference tensor can be changed in inference mode only."""
    if torch.compiler.is_compiling():  # inference mode cannot be queried while tracing
        return True
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def _versions(tensors: Pair) -> tuple[int, ...] | None:
    """How often each tensor was written to; None if torch does not count."""
    key, value = tensors
    if torch.compiler.is_compiling() or key.is_inference() or value.is_inference():
        return None
    return key._version, value._version
