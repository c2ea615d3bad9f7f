"""What identifies a cache file: its header, the fingerprint of the weights, and the lock. Read next: `file.py`."""

import hashlib
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alibi_attn import files

Mode = Literal["r+", "c"]

FORMAT = 2
SIZE = 4096  # the most bytes of a header
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_SAMPLES = 1024  # numbers of each weight that the fingerprint covers


class Descriptor:
    """An open file's descriptor, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def header_for(key: Tensor, value: Tensor, *, capacity: int, fingerprint: str, part: str) -> dict[str, Any]:
    """The header of a file for keys and values like these.

    Raises:
        ValueError: a file cannot hold them.
    """
    for name, x in (("key", key), ("value", value)):
        if x.device.type != "cpu" or str(x.dtype) not in DTYPES:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but a cache in a file holds {', '.join(DTYPES)} on the CPU; move the "
                "model to the CPU, or use a cache in memory"
            )
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype} and value {value.dtype} but a cache in a file has one dtype")
    sizes = {"batch": key.shape[0], "heads": key.shape[1], "head_dims": [key.shape[3], value.shape[3]]}
    about = {"format": FORMAT, "dtype": str(key.dtype), **sizes, "capacity": capacity}
    about |= {"fingerprint": fingerprint, "part": part}
    if len(encoded(about)) > SIZE:
        raise ValueError("the header of a cache does not fit; pass a shorter fingerprint")
    return about


def encoded(about: dict[str, Any]) -> bytes:
    """A line of JSON, and one with its CRC-32."""
    text = json.dumps(about).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def decoded(data: bytes, path: Path) -> dict[str, Any]:
    """What `encoded` wrote at the beginning of a file.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    text, _, rest = data.partition(b"\n")
    if rest[:8] != b"%08x" % zlib.crc32(text):
        raise ValueError(
            f"{path} is damaged or not a cache: its header does not match its checksum; read the text again"
        )
    about: dict[str, Any] = json.loads(text)
    if about["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {about['format']} but this version of alibi-attn reads {FORMAT}; read the text again"
        )
    return about


def open_locked(path: Path, mode: Mode) -> Descriptor:
    """An existing file, opened and locked: one process may write, or several may read.

    Raises:
        OSError: it does not exist.
        ValueError: another process has it open in a way that excludes this one.
    """
    if mode not in ("r+", "c"):
        raise ValueError(f'mode is {mode!r} but must be "r+" (continue the file) or "c" (private changes)')
    while True:
        file = Descriptor(os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY))
        if not files.lock(file.number, shared=mode == "c"):
            raise ValueError(f'{path} is open elsewhere; close it there, or open it with mode="c" everywhere')
        if files.names(path, file.number):
            return file  # else another process has just grown it


def fingerprint(module: nn.Module, *settings: object) -> str:
    """SHA-256 of the names, shapes and dtypes of all weights, of some numbers of each, and of the settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_new(path: Path) -> None:
    """Raises an error if a cache cannot start at this path."""
    check_platform()
    if path.exists():
        raise exists(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or pass another path")


def exists(path: Path) -> ValueError:
    """The error for a path where a cache exists already, perhaps one that another process has just written."""
    return ValueError(f"{path} exists; continue it with open(path), or pass another path")


def check_platform() -> None:
    """Raises an error on platforms where files cannot be mapped as these caches need."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "caches in files need sparse memory maps whose pages can be released, which Windows does not offer; "
            "use a cache in memory, or WSL"
        )
