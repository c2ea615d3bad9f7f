"""The files of a checkpoint, on disk or from the hub: finds the folder, reads config and tensors, writes a folder atomically.

Code in a checkpoint is never run. A damaged file raises a ValueError that names it; a missing file raises an OSError.
Read next: `checkpoint.py`.
"""

import contextlib
import os
import pickle
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from alibi_attn.strict_json import JsonError, parse

CONFIG = "config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
# What is taken from the hub: configs and tokenizers, and weights of the top folder (onnx/ and the like stay there). Never *.py.
_DESCRIPTIONS = ("*.json", "*.txt", "tokenizer*", "*.model")
_SAFE_FILES, _PICKLED_FILES = "model*.safetensors", "pytorch_model*.bin"
# Arguments of `from_pretrained`: for `resolve`, and those that make no difference (nothing is trusted, and both are always so).
HUB = ("revision", "cache_dir", "token", "local_files_only")
IGNORED = ("trust_remote_code", "use_safetensors", "weights_only")
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
# All that a pickle of damaged bytes was seen to raise inside of torch's restricted reader, and what those derive from.
_READ_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
)


def resolve(
    folder_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a checkpoint: the given one where it exists, else the hub's repository of that name, downloaded or cached.

    Config, tokenizer and weights are taken, safetensors where there are any, and no code.

    Args:
        revision, cache_dir, token, local_files_only: as `huggingface_hub.snapshot_download` has them; for the hub only.

    Raises:
        FileNotFoundError: neither a folder nor the name of a repository.
        OSError: the hub does not have it, or cannot be reached.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder} is a file; pass the folder of a checkpoint, the one that holds {CONFIG}")
    name = os.fspath(folder_or_id)
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"there is no folder {name}; pass the folder of a checkpoint, or a repository of the hub (owner/name)"
        )

    def download(weights: str) -> Path:
        return Path(snapshot_download(
            name, allow_patterns=[*_DESCRIPTIONS, weights], revision=revision, cache_dir=cache_dir, token=token,
            local_files_only=local_files_only,
        ))  # fmt: skip

    try:
        found = download(_SAFE_FILES)
        return found if any(found.glob(_SAFE_FILES)) else download(_PICKLED_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OSError(
            f"there is no folder {name}, and the hub did not give that repository ({type(error).__name__}: {_line(error)}); "
            "pass a folder, or check the name, the network and your login"
        ) from error


def read_config(folder: Path) -> dict[str, object]:
    """config.json.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no JSON object.
    """
    return _object(folder / CONFIG, "a config", lacking=f"pass a folder that holds {CONFIG} and the weights")


def read_state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name, on the CPU, in the dtype it was saved in.

    Read is the first that exists of model.safetensors, its index (model.safetensors.index.json with its shards),
    pytorch_model.bin and its index. Pickles are read with `weights_only=True`: nothing in them is executed.
    The tensors of safetensors may be mapped from the file: copy them before anybody writes to it.

    Raises:
        FileNotFoundError: none of the four is there.
        ValueError: a file, or a shard, is damaged, is missing, holds no tensors, or does not hold what its index says.
    """
    path, suffix = _weights(folder)
    return _tensors(path) if path.suffix == suffix else _shards(path, suffix)


def read_names(folder: Path) -> set[str]:
    """The names of the tensors that `read_state` would give, without reading the tensors.

    Raises:
        FileNotFoundError, ValueError: as `read_state`.
    """
    path, suffix = _weights(folder)
    if path.suffix != suffix:
        return set(_places(path, suffix))
    return set(_tensors(path, device="cpu" if path.name == SAFE else "meta"))


def check_new(folder: Path) -> None:
    """Raises FileExistsError where something is there."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a checkpoint is never overwritten: pass a new folder")


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `folder` at the end of the block; nothing stays of it where that raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _weights(folder: Path) -> tuple[Path, str]:
    """The file of the weights or its index, whichever is there first, and the suffix of files that hold tensors."""
    for name in (SAFE, PICKLED):
        for path in (folder / name, folder / f"{name}.index.json"):
            if path.exists():
                return path, Path(name).suffix
    raise FileNotFoundError(
        f"{folder} holds no weights: neither {SAFE} nor {PICKLED}, nor the index of either; download the checkpoint again"
    )


def _shards(index: Path, suffix: str) -> dict[str, Tensor]:
    places = _places(index, suffix)
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        shard = index.parent / file
        if not shard.is_file():
            raise ValueError(f"{shard} is missing, and {index.name} says that it holds weights; {_AGAIN}")
        found |= {name: tensor for name, tensor in _tensors(shard).items() if places.get(name, file) == file}
    if lacking := sorted(places.keys() - found.keys()):
        raise ValueError(
            f"{index.parent / places[lacking[0]]} is damaged: it lacks {lacking[0]}, which {index.name} promises; {_AGAIN}"
        )
    return found


def _places(index: Path, suffix: str) -> dict[str, str]:
    """Names to files, as an index says."""
    places = _object(index, "an index", lacking=_AGAIN).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} is damaged: it has no weight_map from names to files; {_AGAIN}")
    for name, file in places.items():
        # A file beside the index, by its bare name: nothing else, so that no index leads out of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*", file, re.ASCII) or not file.endswith(suffix):
            raise ValueError(
                f"{index} is damaged: it says that {name} is in {file!r}, which is not the name of a {suffix} file beside it; "
                f"{_AGAIN}"
            )
    return places


def _tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """One file of weights; a pickle on "meta" without their numbers, which safetensors maps and does not read."""
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            found = torch.load(path, map_location=device, weights_only=True)
    except _READ_ERRORS as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            reason = "it holds more than tensors, which could execute code and is never read"
        else:
            reason = f"{type(error).__name__}: {_line(error)}"
        raise ValueError(f"{path} is damaged: {reason}; {_AGAIN}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} is damaged: it holds no tensors by name; {_AGAIN}")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} holds a {type(tensor).__name__} at {name!r} but a checkpoint maps names to tensors; {_AGAIN}"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != device:
            raise ValueError(
                f"{path} holds a quantized, sparse or empty tensor at {name} but a checkpoint holds plain ones; {_AGAIN}"
            )
    return dict(found)


def _object(path: Path, wanted: str, *, lacking: str) -> dict[str, object]:
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there; {lacking}") from None
    except JsonError as error:
        raise ValueError(f"{path} is damaged: {error}; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__} but {wanted} is an object; {_AGAIN}")
    return value


def _line(error: BaseException) -> str:
    """The first line of what a library said, short."""
    said = (str(error).strip() or "no reason was given").splitlines()[0].rstrip(" .")
    return said if len(said) <= 200 else f"{said[:200]}…"


_AGAIN = "download or save the checkpoint again"
