"""Checkpoints: a folder per step, whole or not there at all.

    <run>/step-00000200/model.safetensors    the weights
    <run>/step-00000200/config.json          schema, the run's config, how far it came and its curve so far
    <run>/step-00000200/state/               what accelerate needs to resume to the same losses; gone when finished

A folder is written under a temporary name and then renamed; only then are older ones removed.
"""

import dataclasses
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from alibi_attn.lab.config import ConfigError, RunConfig
from alibi_attn.lab.fields import from_json, to_json
from alibi_attn.lab.model import LanguageModel

SCHEMA = 1

_STEP = re.compile(r"step-\d{8,}")


class CheckpointError(ValueError):
    """A checkpoint that is not there, damaged, or written by another schema."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training came.

    Args:
        step: steps that are done.
        seconds: time that they took, checkpoints left out.
        loss_nats: of the last step.
        curve: columns "step", "loss_nats", "learning_rate", every `log_every` steps.
        peak_memory_bytes: of the process or GPU, since the training was last started.
    """

    step: int = 0
    seconds: float = 0.0
    loss_nats: float | None = None
    curve: Mapping[str, Sequence[float]] = dataclasses.field(
        default_factory=lambda: {"step": [], "loss_nats": [], "learning_rate": []}
    )
    peak_memory_bytes: int | None = None


def load_checkpoint(path: Path) -> tuple[LanguageModel, RunConfig]:
    """The model, on the CPU and in evaluation mode, and the config it was trained with.

    Args:
        path: a step's folder, or the folder of a run, which means its newest step.

    Raises:
        CheckpointError: nothing there, damaged, or another schema.
    """
    folder = path if (path / "config.json").exists() else newest(path)
    if folder is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; pass a folder below checkpoints/ that alibi run has written"
        )
    config = _read(folder)[0]
    model = LanguageModel(config.model, trained_length=config.train.length)
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _damaged(folder, "model.safetensors", error) from None
    return model.eval(), config


def newest(run_folder: Path) -> Path | None:
    """The folder of the newest step, or None."""
    if not run_folder.is_dir():
        return None
    steps = [folder for folder in run_folder.iterdir() if _STEP.fullmatch(folder.name)]
    return max(steps, key=lambda folder: int(folder.name.removeprefix("step-")), default=None)


def save_checkpoint(
    run_folder: Path,
    model: nn.Module,
    config: RunConfig,
    progress: Progress,
    accelerator: Accelerator,
    *,
    finished: bool,
) -> Path:
    """Write the step's folder and remove older ones; every process calls this, the first one writes the shared files."""
    final = run_folder / f"step-{progress.step:08d}"
    temporary = run_folder / f".step-{progress.step:08d}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        weights = accelerator.get_state_dict(model)
        if not finished:
            accelerator.save_state(str(temporary / "state"))
        if accelerator.is_main_process:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / "model.safetensors")
            about = {"schema": SCHEMA, "config": to_json(config), "progress": dataclasses.asdict(progress)}
            (temporary / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if accelerator.is_main_process:
        for folder in run_folder.iterdir():
            if folder != final and _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(".tmp")):
                shutil.rmtree(folder)
    accelerator.wait_for_everyone()
    return final


def load_progress(folder: Path) -> Progress:
    """How far the training of this checkpoint came.

    Raises:
        CheckpointError: damaged, or another schema.
    """
    return _read(folder)[1]


def resume(folder: Path, accelerator: Accelerator) -> None:
    """Put the weights, the optimizer and the random numbers that were saved into what the accelerator has prepared.

    Raises:
        CheckpointError: damaged.
    """
    try:
        accelerator.load_state(str(folder / "state"))
    except (
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        SafetensorError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise _damaged(folder, "state", error) from None


def _read(folder: Path) -> tuple[RunConfig, Progress]:
    path = folder / "config.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(folder, "config.json", error) from None
    if not isinstance(about, dict) or "schema" not in about:
        raise CheckpointError(
            f"{path} is not the config of a checkpoint: it has no schema; pass a folder that alibi run has written"
        )
    if about["schema"] != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {about['schema']} but this version reads {SCHEMA}; use the version that wrote it, or train again"
        )
    try:
        return from_json(about.get("config")), Progress(**about["progress"])
    except (ConfigError, KeyError, TypeError) as error:
        raise _damaged(folder, "config.json", error) from None


def _damaged(folder: Path, name: str, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"{folder / name} is damaged or incomplete ({reason}); delete {folder} and train again")
