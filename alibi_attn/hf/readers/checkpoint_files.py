"""The files of a checkpoint, on disk or from the hub: finds the folder, reads config and tensors, writes a folder atomically.

Code in a checkpoint is never run. A damaged file raises a ValueError that names it; a missing file raises an OSError.
Read next: `checkpoint.py`.
"""

import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from alibi_attn.strict_json import JsonError, parse

CONFIG = "config.json"
SAFE, PICKLED, _INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
# Files to download: configs, tokenizers, and weights in the top folder (not those in onnx/ and the like). Never *.py.
_DESCRIPTIONS = ("*.json", "*.txt", "tokenizer*", "*.model")
_SAFE_FILES, _PICKLED_FILES = "model*.safetensors", "pytorch_model*.bin"
# Arguments of `from_pretrained`: those for `resolve`, and those without effect (no code ever runs; the others are always on).
HUB = ("revision", "cache_dir", "token", "local_files_only")
IGNORED = ("trust_remote_code", "use_safetensors", "weights_only")
_STEP = re.compile(r"step-\d{8,}")  # the folder of a model of the lab
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
# Every exception that torch's restricted unpickler was seen to raise on damaged bytes, and their base classes.
READ_ERRORS = (
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
    """The folder of a checkpoint: the given one if it exists, else the hub's repository, downloaded or cached.

    Only the config, the tokenizer and the weights are downloaded (safetensors if available), never code.

    Args:
        revision, cache_dir, token, local_files_only: those of `huggingface_hub.snapshot_download`; ignored for a folder.

    Raises:
        FileNotFoundError: neither an existing folder nor a valid name of a repository.
        ValueError: a model or a run of the lab.
        OSError: the repository does not exist, or the hub cannot be reached.
    """
    folder = Path(folder_or_id)
    if (folder / CONFIG).exists() and not _STEP.fullmatch(folder.name):
        return folder
    if _is_of_the_lab(folder):
        raise ValueError(
            f"{folder} was trained by alibi run; test it with alibi eval, or write it for transformers with alibi export"
        )
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder} is a file; pass the folder of a checkpoint, the one that holds {CONFIG}")
    name = os.fspath(folder_or_id)
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"folder {name} does not exist; pass the folder of a checkpoint, or a repository of the hub (owner/name)"
        )

    hub: Any = {"revision": revision, "cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    try:
        for files in (_SAFE_FILES, _PICKLED_FILES):
            downloaded = Path(snapshot_download(name, allow_patterns=[*_DESCRIPTIONS, files], **hub))
            if any(downloaded.glob(files)):
                break
        return downloaded
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OSError(
            f"folder {name} does not exist, and downloading that repository failed ({type(error).__name__}: {_line(error)}); "
            "pass a folder, or check the name, the network and your login"
        ) from error


def read_config(folder: Path) -> dict[str, object]:
    """The content of config.json.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is not a JSON object, or its "model_type" is not text.
    """
    path = folder / CONFIG
    about: dict[str, object] = read_json(path, advice=f"pass a folder that holds {CONFIG} and the weights")
    if not isinstance(kind := about.get("model_type"), str | None):
        raise ValueError(f"{path} is damaged: model_type is {kind!r} but must be text; {_AGAIN}")
    return about


def read_json(path: Path, kind: type = dict, *, advice: str = "download or save it again") -> Any:
    """The content of a JSON file, a dict or a list.

    Args:
        advice: how to fix a missing file, for the error.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is not JSON, or of another kind.
    """
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; {advice}") from None
    except JsonError as error:
        raise ValueError(f"{path} is damaged: {error}; {_AGAIN}") from None
    if not isinstance(value, kind):
        raise ValueError(
            f"{path} holds a JSON {type(value).__name__} but must hold {'a list' if kind is list else 'an object'}; {_AGAIN}"
        )
    return value


def read_state(folder: Path, *, data: bool = True) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name, on the CPU, in the dtype in which it was saved.

    Reads the first of these that exists: model.safetensors, its index (model.safetensors.index.json, with its shards),
    pytorch_model.bin, its index. Pickles are read with `weights_only=True`, which executes nothing.
    Tensors from safetensors may be mapped from the file: copy them before the file is overwritten.

    Args:
        data: False reads only names and shapes of pickled tensors, which are on "meta"; safetensors are mapped.

    Raises:
        FileNotFoundError: none of the four exists.
        ValueError: a file or shard is damaged, is missing, holds no tensors, or contradicts its index.
    """
    path = weights(folder)
    suffix = Path(path.name.removesuffix(_INDEX)).suffix
    device = "cpu" if data or suffix == ".safetensors" else "meta"
    return _tensors(path, device) if path.suffix == suffix else _shards(path, suffix, device)


def weights(folder: Path) -> Path:
    """The file of weights, or the index of several; raises FileNotFoundError if there is neither."""
    for name in (SAFE, f"{SAFE}{_INDEX}", PICKLED, f"{PICKLED}{_INDEX}"):
        if (path := folder / name).exists():
            return path
    raise FileNotFoundError(
        f"{folder} has no weights: neither {SAFE} nor {PICKLED}, nor an index of either; download the checkpoint again"
    )


def _is_of_the_lab(folder: Path) -> bool:
    """Whether this is a run of the lab, RUN:MODEL, the folder of a model, or one of its steps."""
    if (folder / CONFIG).exists():
        return "schema" in read_config(folder)
    run = folder if folder.is_dir() else Path(str(folder).rpartition(":")[0])
    return any(run.glob(f"checkpoints/**/step-*/{CONFIG}")) or any(folder.glob(f"step-*/{CONFIG}"))


def _shards(index: Path, suffix: str, device: str) -> dict[str, Tensor]:
    places = _places(index, suffix)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        shard = index.parent / file
        if not shard.is_file():
            raise ValueError(f"{shard} is missing, but {index.name} lists weights in it; {_AGAIN}")
        tensors |= {name: tensor for name, tensor in _tensors(shard, device).items() if places.get(name, file) == file}
    if missing := sorted(places.keys() - tensors.keys()):
        raise ValueError(
            f"{index.parent / places[missing[0]]} is damaged: {missing[0]} is missing, but {index.name} lists it there; {_AGAIN}"
        )
    return tensors


def _places(index: Path, suffix: str) -> dict[str, str]:
    """Maps the names of weights to files, as in an index."""
    places: dict[str, str] | None = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} is damaged: it has no weight_map from names to files; {_AGAIN}")
    for name, file in places.items():
        # Only the bare name of a file next to the index, so that an index cannot point outside the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*", file, re.ASCII) or not file.endswith(suffix):
            raise ValueError(
                f"{index} is damaged: it places {name} in {file!r}, which is not the name of a {suffix} file in the same folder; "
                f"{_AGAIN}"
            )
    return places


def _tensors(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors in one file. On "meta" a pickle is read without data; safetensors only maps the file."""
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location=device, weights_only=True)
    except READ_ERRORS as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            reason = "it holds objects other than tensors, which could execute code and are never read"
        else:
            reason = f"{type(error).__name__}: {_line(error)}"
        raise ValueError(f"{path} is damaged: {reason}; {_AGAIN}") from error
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(f"{path} is damaged: it does not map names to tensors; {_AGAIN}")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} has a {type(tensor).__name__} at {name!r} but must map names to tensors; {_AGAIN}"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != device:
            raise ValueError(
                f"{path} has a quantized, sparse or empty tensor at {name}, which is not supported; pass dense tensors"
            )
    return dict(loaded)


def _line(error: BaseException) -> str:
    """The first line of a library's message, shortened."""
    line = (str(error).strip() or "no reason was given").splitlines()[0].rstrip(" .")
    return line if len(line) <= 200 else f"{line[:200]}…"


_AGAIN = "download or save the checkpoint again"
