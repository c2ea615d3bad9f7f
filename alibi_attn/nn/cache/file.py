"""CacheFile: the keys and values of one attention layer in a memory-mapped sparse file.

A file has these parts, little-endian:

    header     JSON and its CRC-32 (`header.py`); written once
    state      two slots, written in turn: tokens, CRC-32 of the table and of the tokens after the last whole tile
    table      one record per whole tile: the norms of its keys and values, and the CRC-32 of its data
    keys       [B, K, capacity, D], so each key head has its own region; unwritten parts use no disk space
    values     the same

Appending writes data, then the table, then a slot, into disk space that was reserved before. A killed process therefore loses
at most its last call, and a full disk loses nothing. Power failures are not covered: only a new file is flushed to the disk.
Read next: `cache.py`.
"""

import itertools
import math
import mmap
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch
from torch import Tensor

from alibi_attn import files
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run.decoding import measured_norms
from alibi_attn.nn.cache import header as cache_header
from alibi_attn.nn.cache.header import DTYPES, Descriptor, Mode

CAPACITY = 1 << 16  # tokens in a new file; doubled when it is full
_SLOT = struct.Struct("<QQII")  # commits, tokens, CRC of the table, CRC of the tail; the slot's own CRC follows
_SLOTS = (4096, 8192)
_TABLE = 65536
_RELEASE = 1024  # tokens appended between two releases of memory, and reserved on the disk at once


class CacheFile:
    """An open file. `tensors` are the keys and values, [B, K, capacity, D], over the mapping; `norms` covers the whole tiles.

    Args:
        file: open for reading and writing, or for reading only with mode "c".
        path: for messages, and for the larger file when it grows; None = a temporary file that has no name.
        header: the JSON object.
        mode: "r+" writes to the file; with "c" changes are private to this process.
        new: the file has only its header so far.
    """

    def __init__(
        self, file: Descriptor, path: Path | None, header: dict[str, Any], mode: Mode, *, new: bool = False
    ) -> None:
        self.file, self.path, self.mode = file, path, mode
        self.folder = None if path is None else path.parent
        self.capacity, self.fingerprint, self.part = header["capacity"], header["fingerprint"], header["part"]
        self.length = self._commits = self._table_crc = self._tail_crc = self._appended = 0
        self._reserved = self._clean = 0
        batch, heads, dtype, tiles = header["batch"], header["heads"], DTYPES[header["dtype"]], self.capacity // TILE
        record = np.dtype([("norms", "<f8", (2, batch, heads)), ("crc", "<u4")])
        start = _TABLE + _whole(tiles * record.itemsize)
        shapes = [(batch, heads, self.capacity, d) for d in header["head_dims"]]
        size = start + sum(_whole(math.prod(shape) * dtype.itemsize) for shape in shapes)
        if new:
            os.ftruncate(file.number, size)
            files.reserve(file.number, _SLOTS[0], 2 * cache_header.SIZE)
        elif os.fstat(file.number).st_size < size:
            raise ValueError(f"{path} is damaged: it is shorter than its header says; read the text again")
        flags = mmap.MAP_SHARED if mode == "r+" else mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(file.number, size, flags=flags)
        self._table = np.frombuffer(self._map, record, tiles, _TABLE)
        self._regions: list[tuple[int, int]] = []  # (first byte, bytes per token) of each key head
        self.tensors: tuple[Tensor, ...] = ()
        with torch.inference_mode(False):
            self._norms = torch.empty(2, batch, heads, tiles, dtype=torch.float64, device="cpu")
            for shape in shapes:
                flat = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start)
                self.tensors += (flat.view(shape),)
                row = shape[-1] * dtype.itemsize
                self._regions += [(start + i * self.capacity * row, row) for i in range(batch * heads)]
                start += _whole(flat.nbytes)

    @classmethod
    def write(
        cls,
        path: Path | None,
        key: Tensor,
        value: Tensor,
        *,
        fingerprint: str,
        part: str,
        source: "CacheFile | None" = None,
        capacity: int | None = None,
    ) -> Self:
        """A file with these keys and values, copied a few at a time, which appears under its path when it is complete.

        Args:
            path: None = a temporary file in the folder of the source, which has no name.
            part: which part of a larger cache it is.
            source: the file that holds the tensors, whose memory is released on the way.
            capacity: of a file that replaces an existing one; None = there is none, or it is an error.

        Raises:
            OSError: the disk is full; no file remains, and an existing one is unchanged.
            ValueError: the path exists, perhaps since another process has just written it.
        """
        room = _whole(max(CAPACITY, capacity or 2 * key.shape[2]), TILE * 256)
        header = cache_header.header_for(key, value, capacity=room, fingerprint=fingerprint, part=part)
        try:
            with _nameless(source) if path is None else files.new_file(path, replace=capacity is not None) as file:
                os.pwrite(file.fileno(), cache_header.encoded(header), 0)
                made = cls(Descriptor(os.dup(file.fileno())), path, header, "r+", new=True)
                made._commit()
                for pair in zip(key.detach().split(_RELEASE, 2), value.detach().split(_RELEASE, 2), strict=True):
                    stop = made.length + pair[0].shape[2]
                    made.prepare(stop - made.length)
                    for tensor, tokens in zip(made.tensors, pair, strict=True):
                        tensor[:, :, made.length : stop] = tokens
                    made.commit(stop - made.length)
                    if source is not None:
                        source.release()
                made._commit()  # both states have all tokens
            return made
        except FileExistsError:
            assert path is not None
            raise cache_header.exists(path) from None

    @classmethod
    def open(cls, path: Path, mode: Mode) -> Self:
        """An existing file; checks its header, its state and its table of norms.

        Raises:
            OSError: it does not exist.
            ValueError: it is damaged, of another format, or another process has it open.
        """
        cache_header.check_platform()
        file = cache_header.open_locked(path, mode)
        opened = cls(file, path, cache_header.decoded(os.pread(file.number, cache_header.SIZE, 0), path), mode)
        slots = []
        for at in _SLOTS:
            state = opened._map[at : at + _SLOT.size + 4]
            if state[_SLOT.size :] == struct.pack("<I", zlib.crc32(state[: _SLOT.size])):
                slots.append(_SLOT.unpack(state[: _SLOT.size]))
        if not slots:
            raise ValueError(f"{path} is damaged: neither of its two states matches its checksum; read the text again")
        opened._commits, opened.length, opened._table_crc, opened._tail_crc = max(slots)
        table = opened._table[: opened.length // TILE]
        if opened.length > opened.capacity or zlib.crc32(table.tobytes()) != opened._table_crc:
            raise ValueError(f"{path} is damaged: its norms do not match their checksum; read the text again")
        opened._norms[..., : len(table)] = torch.from_numpy(table["norms"].copy()).permute(1, 2, 3, 0)
        opened._clean = opened._reserved = opened.length
        return opened

    @property
    def norms(self) -> Norms:
        """The norms of the whole tiles."""
        keys, values = self._norms[..., : self.length // TILE]
        return Norms(keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        return sum(row for _, row in self._regions) * self.length

    def prepare(self, count: int) -> None:
        """Makes room, and reserves disk space, for `count` tokens, which the caller then writes after the others.

        Raises:
            OSError: the disk is full; nothing has changed, where a write would end in a signal.
        """
        stop = self.length + count
        if stop > self.capacity:
            self._grow(2 * stop)
        if self.mode == "c" or stop <= self._reserved:
            return
        until = min(_whole(stop, _RELEASE), self.capacity)
        first, last = (_TABLE + tokens // TILE * self._table.itemsize for tokens in (self._reserved, until))
        files.reserve(self.file.number, first, last - first)
        for start, row in self._regions:
            files.reserve(self.file.number, start + self._reserved * row, (until - self._reserved) * row)
        self._reserved = until

    def commit(self, count: int) -> None:
        """Adds the `count` tokens that were written after the others since `prepare`."""
        stop = self.length + count
        first, tiles = self.length // TILE, stop // TILE
        checksums = self._checksums(self.length, stop, self._tail_crc)
        if tiles > first:
            norms = measured_norms(*(x[:, :, first * TILE : tiles * TILE] for x in self.tensors))
            self._norms[..., first:tiles] = torch.stack([norms.keys, norms.values])
            table = self._table[first:tiles]
            table["norms"] = self._norms[..., first:tiles].permute(3, 0, 1, 2).numpy()
            table["crc"] = checksums[: tiles - first]
            self._table_crc = zlib.crc32(table.tobytes(), self._table_crc)
        self._tail_crc = checksums[-1] if stop % TILE else 0
        self._appended += count
        self.length = stop
        self._commit()
        if self._appended >= _RELEASE:
            self.release()

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        start = length // TILE * TILE
        self.length, self._clean = length, min(self._clean, length)
        self._tail_crc = self._checksums(start, length, 0)[-1]
        self._table_crc = zlib.crc32(self._table[: length // TILE].tobytes())
        self._commit()

    def release(self) -> None:
        """Returns memory to the system: pages are read again from the file when they are needed.

        Private changes have no file, so with mode "c" only pages without changes are released.
        """
        self._appended = 0
        if self.mode == "r+":
            self._map.madvise(mmap.MADV_DONTNEED)
            return
        for start, row in self._regions:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (start + self._clean * row) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > first:
                self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def verify(self) -> None:
        """Compares all data with its checksums.

        Raises:
            ValueError: some tile differs; the message names its tokens.
        """
        wanted = [
            *self._table["crc"][: self.length // TILE].tolist(),
            *([self._tail_crc] if self.length % TILE else []),
        ]
        for tile, crc in enumerate(wanted):
            start = tile * TILE
            if self._checksums(start, min(start + TILE, self.length), 0)[0] != crc:
                raise ValueError(
                    f"{self.path} is damaged at tokens {start} to {start + TILE - 1}; crop({start}) or read again"
                )
            if tile % 16 == 0:
                self.release()

    def _checksums(self, start: int, stop: int, crc: int) -> list[int]:
        """CRC-32 of each tile in tokens [start, stop), the last maybe partial; `crc` covers the tokens before start."""
        rows = [x[:, :, start:stop].permute(2, 0, 1, 3).flatten(1).view(torch.uint8) for x in self.tensors]
        data = torch.cat(rows, dim=1).numpy()
        edges = [start, *range((start // TILE + 1) * TILE, stop, TILE), stop]
        pairs = itertools.pairwise(edges)
        return [zlib.crc32(data[a - start : b - start].data, crc if a == start else 0) for a, b in pairs]

    def _commit(self) -> None:
        self._commits += 1
        state = _SLOT.pack(self._commits, self.length, self._table_crc, self._tail_crc)
        at, state = _SLOTS[self._commits % 2], state + struct.pack("<I", zlib.crc32(state))
        self._map[at : at + len(state)] = state

    def _grow(self, capacity: int) -> None:
        """Continues in a file with more capacity, which replaces the old one; with private changes, in a temporary file."""
        path, folder = self.path if self.mode == "r+" else None, self.folder
        tensors = [x[:, :, : self.length] for x in self.tensors]
        about = {"fingerprint": self.fingerprint, "part": self.part}
        larger = type(self).write(path, *tensors, **about, source=self, capacity=capacity)
        vars(self).update(vars(larger), folder=folder)


def _nameless(source: CacheFile | None) -> IO[bytes]:
    """A temporary file that the system removes when it is closed."""
    return tempfile.TemporaryFile(dir=None if source is None else source.folder)


def _whole(size: int, unit: int = _TABLE) -> int:
    return -(-size // unit) * unit
