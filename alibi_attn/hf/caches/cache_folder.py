"""The folder of an ALiBiCache in files: `cache.json`, `tokens`, and one `CacheFile` per layer.

`cache.json` names the format, the number of layers, the fingerprint of the model and the identity of the cache, which the headers
of its layers repeat. `tokens` has one record per position: the ids of the batch, and the CRC-32 of the identity and the ids.

Ids are written before the keys of a call, so the files agree on a prefix whenever a process ends.
"""

import contextlib
import io
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from alibi_attn.files import new_folder
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.cache.header import FORMAT, Mode, decoded, encoded, exists, fingerprint

_ABOUT = "cache.json"
MOST_LATER = 256  # calls whose token ids wait to be encoded


class TokenIds:
    """Token ids [B, S] in an existing file, or in memory.

    Args:
        memory: the content of the file, if changes are to be private.
        identity: of the cache.
    """

    def __init__(self, path: Path | None = None, *, memory: bytes | None = None, identity: str = "") -> None:
        self.path, self._crc = path, zlib.crc32(identity.encode())
        self.memory = io.BytesIO(memory or b"") if path is None or memory is not None else None
        self._later: list[tuple[int, Tensor]] = []  # not yet encoded: encoding one call costs more than a small layer

    def write(self, at: int, tokens: Tensor) -> None:
        """Sets the ids of the positions from `at` on, tokens [B, T]; drops them if earlier ids are unknown."""
        self._later.append((at, tokens.detach().clone()))
        if self.memory is None or len(self._later) > MOST_LATER:
            self._encode()

    def _encode(self) -> None:
        later, self._later = self._later, []
        for at, tokens in later:
            ids = tokens.long().t().contiguous().numpy()
            records = np.zeros(len(ids), _record(tokens.shape[0]))
            records["ids"], records["crc"] = ids, [zlib.crc32(row, self._crc) for row in ids]
            start = at * records.itemsize
            with self._file() as file:
                if file.seek(0, io.SEEK_END) >= start:
                    file.seek(start)
                    file.write(records.tobytes())
                    file.truncate()

    def read(self, batch: int, length: int) -> Tensor | None:
        """The ids of the first `length` positions, [B, length]; None if they are unknown.

        Raises:
            ValueError: they do not match their checksums.
        """
        record = _record(batch)
        self._encode()
        with self._file() as file:
            file.seek(0)
            data = file.read(length * record.itemsize)
        if len(data) < length * record.itemsize:
            return None
        records = np.frombuffer(data, record)
        if [zlib.crc32(row, self._crc) for row in np.ascontiguousarray(records["ids"])] != records["crc"].tolist():
            raise ValueError(
                f"the token ids of the cache are damaged: {self.path} does not match its checksums; read the text again"
            )
        return torch.from_numpy(records["ids"].T.copy())

    def forget(self) -> None:
        """Makes the ids unknown."""
        self._later.clear()
        with self._file() as file:
            file.truncate(0)

    def _file(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        if self.memory is not None:
            return contextlib.nullcontext(self.memory)
        assert self.path is not None
        return open(self.path, "r+b")


def describe(model: nn.Module) -> dict[str, Any]:
    """The content of `cache.json` for a cache of this model."""
    settings = [vars(layer)["alibi_settings"] for layer in model.modules() if "alibi_settings" in vars(layer)]
    numbers = [(one.slopes, one.scale, one.numerics) for one in settings]
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    return {"format": FORMAT, "layers": layers, "fingerprint": fingerprint(model, type(model).__name__, numbers)}


def writes(model: nn.Module) -> int:
    """How often the weights have been written to, as far as torch counts it: a changed number means that they may differ."""
    weights = (*model.parameters(), *model.buffers())
    return sum(weight._version for weight in weights if not weight.is_inference())


@contextlib.contextmanager
def created(path: Path, about: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder of a cache without layers, under a temporary name; at the end of the block it becomes `path`.

    Yields its description, too, with an identity that all its files get, so that files of two caches are not mixed.

    Raises:
        ValueError: the path exists, perhaps since another process has just written it.
    """
    about = {**about, "id": secrets.token_hex(8)}
    try:
        with new_folder(path) as folder:
            (folder / _ABOUT).write_bytes(encoded(about))
            token_path(folder).touch()
            yield folder, about
    except FileExistsError:
        raise exists(path) from None


def remove(folder: Path) -> None:
    """Deletes a cache, and its folder if it holds nothing else."""
    for path in (folder / _ABOUT, token_path(folder), *folder.glob("layer-[0-9][0-9][0-9]")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def read_description(folder: Path) -> dict[str, Any]:
    """Reads `cache.json`.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or of another format.
    """
    if not (folder / _ABOUT).is_file():
        found = "does not exist" if not folder.exists() else f"holds no {_ABOUT}" if folder.is_dir() else "is a file"
        raise FileNotFoundError(
            f"{folder} {found}; pass the folder of an ALiBiCache, or make a new one: ALiBiCache(folder)"
        )
    return decoded((folder / _ABOUT).read_bytes(), folder / _ABOUT)


def part(about: dict[str, Any], layer: int) -> str:
    """Identifies the file of a layer of the described cache."""
    return f"layer {layer} of {about['id']}"


def layer_path(folder: Path, layer: int) -> Path:
    """The file of a layer."""
    return folder / f"layer-{layer:03}"


def open_layer(folder: Path, about: dict[str, Any], layer: int, mode: Mode) -> KVCache:
    """The cache of a layer; empty if the layer was never written. Changes of mode "c" are private.

    Raises:
        ValueError: its file is damaged, open elsewhere, or of another cache or layer.
    """
    path, wanted = layer_path(folder, layer), part(about, layer)
    if not path.exists():
        store = KVCache(path if mode == "r+" else None)
        store.part = wanted
        return store
    store = KVCache.open(path, mode=mode)
    if store.part != wanted:
        raise ValueError(
            f"{path} is {store.part or 'a cache of its own'}, not {wanted}: files of two caches are mixed; read the text again"
        )
    return store


def token_path(folder: Path) -> Path:
    """The file of the token ids."""
    return folder / "tokens"


def _record(batch: int) -> np.dtype[Any]:
    return np.dtype([("ids", "<i8", (batch,)), ("crc", "<u4")])
