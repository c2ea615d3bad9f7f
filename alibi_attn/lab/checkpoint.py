"""Checkpoints: a folder per step, whole or not there at all.

    <run>/step-00000200/model.safetensors    the weights
    <run>/step-00000200/config.json          schema, the run's config, how far it came, its curves so far, the files' hashes
    <run>/step-00000200/tokenizer.json       what turns text into its tokens
    <run>/step-00000200/state/               what else resuming to the same losses needs (`state.py`); gone when finished

A folder is written under a temporary name, brought to the disk, and then renamed; only then are older ones removed. What
is read is held against its hash first.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alibi_attn.lab.config import ConfigError, RunConfig
from alibi_attn.lab.fields import from_json, to_json
from alibi_attn.lab.model import LanguageModel
from alibi_attn.lab.parallel import Training
from alibi_attn.lab.sources import CorpusError
from alibi_attn.lab.state import READ_ERRORS, load_state, save_state
from alibi_attn.lab.tokenizing import Tokenizer, load_tokenizer, save_tokenizer
from alibi_attn.records import finite
from alibi_attn.strict_json import JsonError, parse

SCHEMA = 2

_STEP = re.compile(r"step-\d{8,}")
_CURVE = ("step", "loss_nats", "learning_rate")
_VALIDATION = ("step", "seconds", "nats", "tokens")


class CheckpointError(ValueError):
    """A checkpoint that is not there, damaged, of another config or schema, or that cannot be written."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training came.

    Args:
        step: steps that are done.
        seconds: time that they took, checkpoints left out.
        loss_nats: of the last step.
        curve: columns "step", "loss_nats", "learning_rate", every `log_every` steps.
        peak_memory_bytes: of the process or GPU, since the training was last started.
        validation: columns "step", "seconds", "nats", "tokens", every `validate_every` steps.
    """

    step: int = 0
    seconds: float = 0.0
    loss_nats: float | None = None
    curve: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in _CURVE})
    peak_memory_bytes: int | None = None
    validation: Mapping[str, Sequence[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in _VALIDATION}
    )


def load_checkpoint(path: Path) -> tuple[LanguageModel, RunConfig]:
    """The model, on the CPU and in evaluation mode, and the config it was trained with.

    Args:
        path: a step's folder, or the folder of a run, which means its newest step.

    Raises:
        CheckpointError: nothing there, damaged, or another schema.
    """
    folder = _step_folder(path)
    config, _, hashes = _read(folder)
    _verify(folder, hashes, "model.safetensors")
    try:
        model = LanguageModel(config.model, trained_length=config.train.length)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} asks for a model that cannot be made here ({_first_line(error)})"
        ) from None
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _damaged(folder, "model.safetensors", error) from None
    return model.eval(), config


def load_checkpoint_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the text that the model was trained on.

    Args:
        path: as for `load_checkpoint`.

    Raises:
        CheckpointError: nothing there, or damaged.
    """
    folder = _step_folder(path)
    _verify(folder, _read(folder)[2], "tokenizer.json")
    try:
        return load_tokenizer(folder / "tokenizer.json")
    except (OSError, CorpusError) as error:
        raise _damaged(folder, "tokenizer.json", error) from None


def newest(run_folder: Path) -> Path | None:
    """The folder of the newest step, or None."""
    if not run_folder.is_dir():
        return None
    steps = [folder for folder in run_folder.iterdir() if _STEP.fullmatch(folder.name)]
    return max(steps, key=lambda folder: int(folder.name.removeprefix("step-")), default=None)


def save_checkpoint(
    run_folder: Path,
    training: Training,
    config: RunConfig,
    progress: Progress,
    tokenizer: Tokenizer,
    *,
    finished: bool,
) -> Path:
    """Write the step's folder and remove older ones; every process calls this, the first one writes the shared files.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    final = run_folder / f"step-{progress.step:08d}"
    temporary = run_folder / f".step-{progress.step:08d}.tmp"
    first, wait = training.accelerator.is_main_process, training.accelerator.wait_for_everyone
    try:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "state").mkdir(parents=True)
        wait()
        weights = training.weights()
        if not finished:
            save_state(temporary / "state", training)
        if first:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / "model.safetensors")
        wait()
        if first:
            if finished:
                (temporary / "state").rmdir()
            save_tokenizer(tokenizer, temporary / "tokenizer.json")
            about = {
                "schema": SCHEMA,
                "config": to_json(config),
                "progress": dataclasses.asdict(progress),
                "sha256": _hashes(temporary),
            }
            (temporary / "config.json").write_text(json.dumps(finite(about), indent=1) + "\n", encoding="utf-8")
            _bring_to_disk(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            _bring_to_disk(run_folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final} cannot be written ({_first_line(error)}); make room, then run the same command again: "
            + ("it goes on from " + older.name if (older := newest(run_folder)) else "it begins again")
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if first:
        for folder in run_folder.iterdir():
            if folder != final and _STEP.fullmatch(folder.name.removeprefix(".").removesuffix(".tmp")):
                shutil.rmtree(folder)
    wait()
    return final


def load_progress(folder: Path, config: RunConfig) -> Progress:
    """How far the training of this checkpoint came.

    Raises:
        CheckpointError: damaged, of another schema, or of a training that is not this config's (its test may differ).
    """
    found, progress, _ = _read(folder)
    for section in ("model", "data", "train"):
        mine, theirs = getattr(config, section), getattr(found, section)
        if mine != theirs:
            names = (field.name for field in dataclasses.fields(mine))
            name = next(name for name in names if getattr(mine, name) != getattr(theirs, name))
            raise CheckpointError(
                f"{folder} was trained with {section}.{name} = {getattr(theirs, name)!r}, not {getattr(mine, name)!r}; "
                "pass another folder, or the config that began it"
            )
    return progress


def resume(folder: Path, training: Training) -> None:
    """Put the weights and the optimizer that were saved into what was prepared.

    Raises:
        CheckpointError: damaged.
    """
    hashes = _read(folder)[2]
    if not any(name.startswith("state/") for name in hashes):
        raise _damaged(folder, "state", FileNotFoundError("it holds a finished model only"))
    for name in hashes:
        _verify(folder, hashes, name)
    try:
        load_state(folder / "state", folder / "model.safetensors", training)
    except READ_ERRORS as error:
        raise _damaged(folder, "state", error) from None


def _step_folder(path: Path) -> Path:
    folder = path if (path / "config.json").exists() else newest(path)
    if folder is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; pass a folder below checkpoints/ that alibi run has written"
        )
    return folder


def _read(folder: Path) -> tuple[RunConfig, Progress, Mapping[str, str]]:
    path = folder / "config.json"
    try:
        about = parse(path.read_bytes())
    except (OSError, JsonError) as error:
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
        return from_json(about.get("config")), _progress(about["progress"]), dict(about["sha256"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, "config.json", error) from None


def _progress(data: dict[str, object]) -> Progress:
    """Raises TypeError or ValueError where it is not what was written: training would stumble over it steps later."""
    found = Progress(**data)  # type: ignore[arg-type]
    kinds = {"step": int, "seconds": int | float, "loss_nats": int | float | None, "peak_memory_bytes": int | None}
    for name, kind in kinds.items():
        value = getattr(found, name)
        if not isinstance(value, kind) or (value or 0) < 0:
            raise ValueError(f"progress.{name} is {value!r} but must be a number, 0 or more")
    for name, curve, columns in (("curve", found.curve, _CURVE), ("validation", found.validation, _VALIDATION)):
        if not isinstance(curve, dict) or set(curve) != set(columns):
            raise ValueError(f"progress.{name} must have the columns {', '.join(columns)}")
        lengths = {len(column) if isinstance(column, list) else -1 for column in curve.values()}
        cells = [cell for column in curve.values() if isinstance(column, list) for cell in column]
        if len(lengths) > 1 or lengths == {-1} or not all(isinstance(cell, int | float | None) for cell in cells):
            raise ValueError(f"the columns of progress.{name} must be lists of numbers of one length")
    return found


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _hash(path) for path in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path, hashes: Mapping[str, str], name: str) -> None:
    try:
        found = _hash(folder / name)
    except OSError as error:
        raise _damaged(folder, name, error) from None
    if found != hashes.get(name):
        raise _damaged(folder, name, ValueError("not the bytes that were written"))


def _bring_to_disk(folder: Path) -> None:
    """Names and contents, so that a renamed folder is whole even after the power went."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _damaged(folder: Path, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / name} is damaged or incomplete ({_first_line(error)}); delete {folder} and train again"
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
