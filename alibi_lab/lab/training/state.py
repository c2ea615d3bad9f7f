"""Saves and loads the state that resuming needs in addition to the weights.

One process or DDP writes the optimizer's state to `optimizer.pt`. FSDP writes the shards of weights and optimizer as a
distributed checkpoint, one file per process, which any number of processes can read. Read next: `checkpoint.py`.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from alibi_lab.lab.training.parallel import Training

READ_ERRORS = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
    SafetensorError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


def save_state(folder: Path, training: Training) -> None:
    """Write the state into an existing folder; every process must call this.

    Raises:
        OSError, RuntimeError: the state cannot be written.
    """
    if training.sharded:
        _save_shards(folder, training)
    elif training.accelerator.is_main_process:
        with (folder / "optimizer.pt").open("wb") as file:
            scaler = training.accelerator.scaler  # for half precision
            torch.save(
                {"optimizer": training.optimizer.state_dict(), "scaler": scaler.state_dict() if scaler else None}, file
            )


def load_state(folder: Path, weights: Path, training: Training) -> None:
    """Restore the state that `save_state` wrote, and the weights: from the shards, or from the file `weights`.

    Raises:
        READ_ERRORS: the state cannot be read, or belongs to another model.
    """
    if training.sharded:
        _load_shards(folder, training)
        return
    training.model.load_state_dict(load_file(weights))
    state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    training.optimizer.load_state_dict(state["optimizer"])
    if training.accelerator.scaler is not None:
        training.accelerator.scaler.load_state_dict(state["scaler"])


def _save_shards(folder: Path, training: Training) -> None:
    # These imports take a second, and only FSDP needs them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = get_state_dict(training.model, training.bare_optimizer)
    try:
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    except CheckpointException as error:
        raise _reason(error) from None


def _load_shards(folder: Path, training: Training) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer = get_state_dict(training.model, training.bare_optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise _reason(error) from None
    set_state_dict(
        training.model, training.bare_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _reason(error: BaseException) -> OSError:
    """The first process's error as an OSError."""
    failures = getattr(error, "failures", {})
    first = next((failure[0] for failure in failures.values()), error)
    return first if isinstance(first, OSError) else OSError(str(first).strip().splitlines()[-1])
