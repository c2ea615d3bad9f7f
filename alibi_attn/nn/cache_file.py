"""CacheFile: the keys and values of one attention layer in a memory-mapped sparse file.

A file has these parts, little-endian:

    header     JSON and its CRC-32: format, dtype, shapes, capacity, fingerprint of the weights; written once
    state      two slots, written in turn: tokens, CRC-32 of the table and of the tokens after the last whole tile
    table      one record per whole tile: the norms of its keys and values, and the CRC-32 of its data
    keys       [B, K, capacity, D], so each key head has its own region; unwritten parts use no disk space
    values     the same

Appending writes data, then the table, then a slot. A killed process therefore loses at most its last call. Power failures are not
covered: nothing is flushed to the disk. Read next: `cache.py`.
"""

import hashlib
import json
import math
import mmap
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.decoding import measured_norms

Mode = Literal["r+", "c"]

FORMAT = 1
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
CAPACITY = 1 << 16  # tokens in a new file; doubled when it is full
_SLOT = struct.Struct("<QQII")  # commits, tokens, CRC of the table, CRC of the tail; the slot's own CRC follows
_SLOTS = (4096, 8192)
_TABLE = 65536
_RELEASE = 1024  # tokens appended between two releases of memory, and reserved on the disk at once
_SAMPLES = 1024  # numbers of each weight that the fingerprint covers


class Descriptor:
    """An open file's descriptor, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class CacheFile:
    """An open file. `key` and `value` are [B, K, capacity, D] over the mapping; `norms` covers the whole tiles.

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
        self.capacity, self.fingerprint = header["capacity"], header["fingerprint"]
        self.length = self._commits = self._table_crc = self._tail_crc = self._appended = 0
        self._reserved = self._clean = 0
        batch, heads = header["batch"], header["heads"]
        self._record = np.dtype([("norms", "<f8", (2, batch, heads)), ("crc", "<u4")])
        dtype, tiles = DTYPES[header["dtype"]], self.capacity // TILE
        start = _TABLE + _whole(tiles * self._record.itemsize)
        self._regions: list[tuple[int, int]] = []  # (first byte, bytes per token) of each key head
        flags = mmap.MAP_SHARED if mode == "r+" else mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        shapes = [(batch, heads, self.capacity, d) for d in header["head_dims"]]
        size = start + sum(_whole(math.prod(shape) * dtype.itemsize) for shape in shapes)
        if new:
            os.ftruncate(file.number, size)
        elif os.fstat(file.number).st_size < size:
            raise ValueError(f"{path} is damaged: it is shorter than its header says; read the text again")
        self._map = mmap.mmap(file.number, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        tensors = []
        for shape in shapes:
            count = math.prod(shape)
            with torch.inference_mode(False):
                tensors.append(torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape))
            row = shape[-1] * dtype.itemsize
            self._regions += [(start + i * self.capacity * row, row) for i in range(batch * heads)]
            start += _whole(count * dtype.itemsize)
        self.key, self.value = tensors
        self._norms = torch.empty(2, batch, heads, tiles, dtype=torch.float64, device="cpu")

    @classmethod
    def create(
        cls, path: Path | None, key: Tensor, value: Tensor, *, fingerprint: str, capacity: int | None = None,
        folder: Path | None = None,
    ) -> Self:  # fmt: skip
        """A new, empty file for keys and values like these, which appears under its path when `publish` is called.

        Without a path it is a temporary file in the folder, which has no name.
        """
        check_platform()
        for name, x in (("key", key), ("value", value)):
            if x.device.type != "cpu" or str(x.dtype) not in DTYPES:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device} but a cache in a file holds {', '.join(DTYPES)} on the CPU; move the "
                    "model to the CPU, or use a cache in memory"
                )
        if key.dtype != value.dtype:
            raise ValueError(f"key is {key.dtype} and value {value.dtype} but a cache in a file has one dtype")
        header = {
            "format": FORMAT, "dtype": str(key.dtype), "batch": key.shape[0], "heads": key.shape[1],
            "head_dims": [key.shape[3], value.shape[3]], "capacity": _whole(capacity or CAPACITY, TILE * 256),
            "fingerprint": fingerprint,
        }  # fmt: skip
        text = json.dumps(header).encode()
        text += b"\n%08x\n" % zlib.crc32(text)
        if len(text) > _SLOTS[0]:
            raise ValueError("the header of a cache does not fit; pass a shorter fingerprint")
        if path:
            partial(path).unlink(missing_ok=True)
            file = Descriptor(os.open(partial(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        else:
            number, name = tempfile.mkstemp(dir=folder)
            file = Descriptor(number)
            os.unlink(name)
        lock(file, path, "r+")
        os.pwrite(file.number, text, 0)
        made = cls(file, path, header, "r+", new=True)
        made._commit()
        return made

    @classmethod
    def copy(
        cls, path: Path | None, key: Tensor, value: Tensor, *, fingerprint: str, capacity: int, folder: Path | None = None,
        release: Callable[[], None] | None,
    ) -> Self:  # fmt: skip
        """A published file with these keys and values, copied a few at a time; `release` frees the memory of the source."""
        made = cls.create(path, key, value, fingerprint=fingerprint, capacity=capacity, folder=folder)
        try:
            for start in range(0, key.shape[2], _RELEASE):
                part = slice(start, start + _RELEASE)
                made.append(key[:, :, part].detach(), value[:, :, part].detach())
                if release is not None:
                    release()
            return made.publish()
        finally:  # a full disk leaves no incomplete file
            if path is not None:
                partial(path).unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path, mode: Mode) -> Self:
        """An existing file; checks its header, its state and its table of norms.

        Raises:
            OSError: it does not exist.
            ValueError: it is damaged, of another format, or another process has it open.
        """
        check_platform()
        if mode not in ("r+", "c"):
            raise ValueError(f'mode is {mode!r} but must be "r+" (continue the file) or "c" (private changes)')
        file = Descriptor(os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY))
        lock(file, path, mode)
        if not os.path.samestat(os.fstat(file.number), os.stat(path)):  # meanwhile another process grew it
            return cls.open(path, mode)
        text, _, rest = os.pread(file.number, _SLOTS[0], 0).partition(b"\n")
        if rest[:8] != b"%08x" % zlib.crc32(text):
            raise ValueError(
                f"{path} is damaged or not a cache: its header does not match its checksum; read the text again"
            )
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise ValueError(f"{path} has format {header['format']} but this version of alibi-attn reads {FORMAT}")
        opened = cls(file, path, header, mode)
        opened._read_state()
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

    def append(self, key: Tensor, value: Tensor) -> None:
        """Writes key and value, [B, K, T, D], after the others, and commits them."""
        for name, new, held in (("key", key, self.key), ("value", value, self.value)):
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]) or new.dtype != held.dtype:
                raise ValueError(
                    f"{name} is {list(new.shape)} {new.dtype} but the file holds {list(held.shape)} {held.dtype}"
                )
        if key.shape[2] == 0:
            return
        stop = self.length + key.shape[2]
        if stop > self.capacity:
            self._grow(2 * stop)
        self._reserve(stop)
        self.key[:, :, self.length : stop], self.value[:, :, self.length : stop] = key, value
        first, tiles = self.length // TILE, stop // TILE
        checksums = self._checksums(self.length, stop, self._tail_crc)
        if tiles > first:
            whole = slice(first * TILE, tiles * TILE)
            norms = measured_norms(self.key[:, :, whole], self.value[:, :, whole])
            self._norms[..., first:tiles] = torch.stack([norms.keys, norms.values])
            self._write_table(first, checksums[: tiles - first])
        self._tail_crc = checksums[-1] if stop % TILE else 0
        self._appended += stop - self.length
        self.length = stop
        self._commit()
        if self._appended >= _RELEASE:
            self.release()

    def check_weights(self, weights: str) -> None:
        """Raises an error if other weights wrote the file; an empty fingerprint matches any weights."""
        if weights and self.fingerprint and weights != self.fingerprint:
            raise ValueError(
                f"{self.path} was written with other weights or settings; pass the layer that wrote it, or a new cache"
            )

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        start = length // TILE * TILE
        self.length, self._clean = length, min(self._clean, length)
        self._tail_crc = self._checksums(start, length, 0)[-1] if length > start else 0
        self._table_crc = zlib.crc32(self._table_bytes(length // TILE))
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
        wanted = [*self._table(self.length // TILE)["crc"].tolist(), *([self._tail_crc] if self.length % TILE else [])]
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
        rows = [x[:, :, start:stop].permute(2, 0, 1, 3).flatten(1).view(torch.uint8) for x in (self.key, self.value)]
        data, checksums = torch.cat(rows, dim=1).numpy(), []
        at = 0
        while at < stop - start:
            end = min(at + TILE - (start + at) % TILE, stop - start)
            checksums.append(zlib.crc32(data[at:end].data, crc))
            at, crc = end, 0
        return checksums

    def _write_table(self, first: int, checksums: list[int]) -> None:
        table = np.zeros(len(checksums), self._record)
        table["norms"] = self._norms[..., first : first + len(table)].permute(3, 0, 1, 2).numpy()
        table["crc"] = checksums
        self._table_crc = zlib.crc32(table.tobytes(), self._table_crc)
        at = _TABLE + first * self._record.itemsize
        self._map[at : at + table.nbytes] = table.tobytes()

    def _table_bytes(self, tiles: int) -> bytes:
        return self._map[_TABLE : _TABLE + tiles * self._record.itemsize]

    def _table(self, tiles: int) -> Any:
        return np.frombuffer(self._table_bytes(tiles), self._record)

    def _commit(self) -> None:
        self._commits += 1
        state = _SLOT.pack(self._commits, self.length, self._table_crc, self._tail_crc)
        at, state = _SLOTS[self._commits % 2], state + struct.pack("<I", zlib.crc32(state))
        self._map[at : at + len(state)] = state

    def _read_state(self) -> None:
        slots = []
        for at in _SLOTS:
            state = self._map[at : at + _SLOT.size + 4]
            if state[_SLOT.size :] == struct.pack("<I", zlib.crc32(state[: _SLOT.size])):
                slots.append(_SLOT.unpack(state[: _SLOT.size]))
        if not slots:
            raise ValueError(
                f"{self.path} is damaged: neither of its two states matches its checksum; read the text again"
            )
        self._commits, self.length, self._table_crc, self._tail_crc = max(slots)
        tiles = self.length // TILE
        if self.length > self.capacity or zlib.crc32(self._table_bytes(tiles)) != self._table_crc:
            raise ValueError(f"{self.path} is damaged: its norms do not match their checksum; read the text again")
        self._norms[..., :tiles] = torch.from_numpy(self._table(tiles)["norms"].copy()).permute(1, 2, 3, 0)
        self._clean = self._reserved = self.length

    def _reserve(self, stop: int) -> None:
        """Reserves disk space for tokens before `stop`, so that a full disk raises an error here and not a signal later."""
        if self.mode == "c" or stop <= self._reserved or not hasattr(os, "posix_fallocate"):
            return
        until = min(_whole(stop, _RELEASE), self.capacity)
        for start, row in self._regions:
            os.posix_fallocate(self.file.number, start + self._reserved * row, (until - self._reserved) * row)
        self._reserved = until

    def _grow(self, capacity: int) -> None:
        """Continues in a file with more capacity, which replaces the old one; with private changes, in a temporary file."""
        path = self.path if self.mode == "r+" else None
        key, value = self.key[:, :, : self.length], self.value[:, :, : self.length]
        larger = type(self).copy(
            path, key, value, fingerprint=self.fingerprint, capacity=capacity, folder=self.folder, release=self.release
        )
        vars(self).update(vars(larger), folder=self.folder)

    def publish(self) -> Self:
        """Gives a created file its name atomically: a process that is killed leaves a valid file or none."""
        if self.path is not None:
            os.replace(partial(self.path), self.path)
        return self


def save_pair(path: Path, key: Tensor, value: Tensor, *, weights: str, release: Callable[[], None] | None) -> None:
    """Writes keys and values to a new file, which appears under its name when it is complete."""
    check_new(path)
    CacheFile.copy(path, key, value, fingerprint=weights, capacity=2 * key.shape[2], release=release)


def partial(path: Path) -> Path:
    """The name of a file or folder until it is complete."""
    return path.with_name(path.name + ".partial")


def check_new(path: Path) -> None:
    """Raises an error if a cache cannot start at this path."""
    check_platform()
    if path.exists():
        raise ValueError(f"{path} exists; continue it with open(path), or pass another path")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or pass another path")


def fingerprint(module: nn.Module, *settings: object) -> str:
    """SHA-256 of the names, shapes and dtypes of all weights, of some numbers of each, and of the settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_platform() -> None:
    """Raises an error on platforms where files cannot be mapped as this module needs."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "caches in files need sparse memory maps whose pages can be released, which Windows does not offer; "
            "use a cache in memory, or WSL"
        )


def lock(file: Descriptor, path: Path | None, mode: Mode) -> None:
    """Locks an open file: one process may write, or several may read.

    Raises:
        ValueError: another process has it open in a way that excludes this one.
    """
    import fcntl  # not on Windows

    try:
        fcntl.flock(file.number, (fcntl.LOCK_EX if mode == "r+" else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f'{path} is open elsewhere; close it there, or open it with mode="c" everywhere') from None


def _whole(size: int, unit: int = _TABLE) -> int:
    return -(-size // unit) * unit
