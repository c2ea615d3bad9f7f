"""Saves and loads the state that resuming needs in addition to the weights.

One process or DDP writes the optimizer's state to `optimizer.pt`. FSDP writes the shards of weights and optimizer as a
distributed checkpoint, one file per process, which any number of processes can read. Read next: `checkpoint.py`.
"""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from alibi_lab.lab.training.parallel import Training

READ_ERRORS = (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError, UnpicklingError, BadZipFile)


def save_state(folder: Path, training: Training) -> None:
    """Write the state into an existing folder; every process must call this.

    Raises:
        OSError, RuntimeError: the state cannot be written.
    """
    if training.sharded:
        from torch.distributed.checkpoint.state_dict_saver import save  # takes a second, and only FSDP needs it

        _with_shards(folder, training, save)
    elif training.accelerator.is_main_process:
        scaler = training.accelerator.scaler  # for half precision
        state = {"optimizer": training.optimizer.state_dict(), "scaler": scaler.state_dict() if scaler else None}
        with (folder / "optimizer.pt").open("wb") as file:
            torch.save(state, file)


def load_state(folder: Path, weights: Path, training: Training) -> None:
    """Restore the state that `save_state` wrote, and the weights: from the shards, or from the file `weights`.

    Raises:
        READ_ERRORS: the state cannot be read, or belongs to another model.
    """
    if training.sharded:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        found = _with_shards(folder, training, load)
        parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(training.model, training.optimizer, **parts)
        return
    training.model.load_state_dict(load_file(weights))
    state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    training.optimizer.load_state_dict(state["optimizer"])
    if training.accelerator.scaler is not None:
        training.accelerator.scaler.load_state_dict(state["scaler"])


def _with_shards(folder: Path, training: Training, transfer: Callable[..., object]) -> dict[str, Any]:
    """The state of the sharded model and optimizer, after it was written to the folder or read from it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))
    try:
        transfer(state, checkpoint_id=folder)
    except CheckpointException as error:
        first = next((failure[0] for failure in error.failures.values()), error)
        raise first if isinstance(first, OSError) else OSError(str(first).strip().splitlines()[-1]) from None
    return state
