"""Checkpoints: one folder per step, written atomically.

    <run>/step-00000200/model.safetensors    the weights
    <run>/step-00000200/config.json          schema, the run's config, its progress and curves so far, all hashes
    <run>/step-00000200/tokenizer.json       the tokenizer
    <run>/step-00000200/state/               the other state for exact resumption; none when finished

Older folders are removed only after the new one is complete (`alibi_attn/files.py`). Every file is verified before it
is used, including config.json (`lab/sealed_folder.py`).

The other state of one process or DDP is that of the optimizer, `optimizer.pt`. FSDP writes the shards of weights and optimizer
as a distributed checkpoint, one file per process, which any number of processes can read.
"""

import contextlib
import dataclasses
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias
from zipfile import BadZipFile

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alibi_attn.files import new_folder, remove_leftovers, replace_file
from alibi_attn.strict_json import parse
from alibi_lab.lab import sealed_folder
from alibi_lab.lab.config import IMPORT_PATH, ConfigError, RunConfig
from alibi_lab.lab.config_io import from_json, to_json
from alibi_lab.lab.data.sources import CorpusError
from alibi_lab.lab.data.tokenizing import Tokenizer, load_tokenizer
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.method_checks import source_facts
from alibi_lab.lab.model.method_trial import try_method
from alibi_lab.lab.training.parallel import Training
from alibi_lab.position_methods import LOOKS
from alibi_lab.records import finite

Curve: TypeAlias = Mapping[str, Sequence[float]]

SCHEMA = 3

_STEP = re.compile(r"step-\d{8,}")
_READ_ERRORS = (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError, UnpicklingError, BadZipFile)


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another config or schema, or that cannot be written."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Args:
        step: the number of finished steps.
        seconds: their time, without checkpoints.
        loss_nats: the loss of the last step.
        curve: columns "step", "loss_nats", "learning_rate", every `log_every` steps.
        peak_memory_bytes: of the process or GPU, since the training was last started or resumed.
        validation: columns "step", "seconds", "nats", "tokens", every `validate_every` steps.
    """

    step: int = 0
    seconds: float = 0.0
    loss_nats: float | None = None
    curve: Curve = dataclasses.field(default_factory=lambda: {"step": [], "loss_nats": [], "learning_rate": []})
    peak_memory_bytes: int | None = None
    validation: Curve = dataclasses.field(default_factory=lambda: {"step": [], "seconds": [], "nats": [], "tokens": []})

    def curves(self) -> dict[str, Curve]:
        """The curves of its record, by name."""
        return {"training": self.curve} | ({"validation": self.validation} if self.validation["step"] else {})


def load_checkpoint(path: Path, *, method: str | None = None) -> tuple[LanguageModel, RunConfig]:
    """The model, on the CPU and in evaluation mode, and the config it was trained with.

    Args:
        path: the folder of a step, or the folder of a run, whose newest step is loaded.
        method: the code of the position method, `FILE.py:Class`. Required if the method is not built in, because
            loading a checkpoint never imports code that the checkpoint names.

    Warns:
        UserWarning: the method's source differs from the one that trained the model.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another schema; `method` is required, or has
            other parameters.
        PositionError: a hook of `method` returns something invalid, or it sees the future.
    """
    folder, trained = step_folder(path), checkpoint_method(path)
    if method is None and trained not in LOOKS:
        code = trained if IMPORT_PATH.fullmatch(trained) else "FILE.py:Class"
        raise CheckpointError(
            f"{folder} was trained with the position method {trained!r}, which is not built in; a checkpoint's code is never "
            f"imported on its own: provide it with --method {code}, or in Python with method={code!r}"
        )
    if method not in (None, trained) and (trained in LOOKS or method in LOOKS):
        raise CheckpointError(
            f"{folder} was trained with the position method {trained!r}, not {method!r}; pass the class that trained it, or "
            "nothing for a method that is built in"
        )
    config, _ = _read(folder, method)
    trained_with = _manifest(folder).get("method", {})
    if trained_with and trained_with["sha256"] != source_facts(config.model.method)["sha256"]:
        changed = f"{config.model.method} has changed since it trained {folder}; its results may differ"
        warnings.warn(changed, stacklevel=2)
    _verify(folder, "model.safetensors")
    if IMPORT_PATH.fullmatch(config.model.method):
        try_method(config.model, config.train.length)
    try:
        model = LanguageModel(config.model, trained_length=config.train.length)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} asks for a model that cannot be made here ({_first_line(error)})"
        ) from None
    with _undamaged(folder, "model.safetensors", OSError, SafetensorError, RuntimeError):
        weights = load_file(folder / "model.safetensors")
        if IMPORT_PATH.fullmatch(config.model.method):
            now, then = (
                {name: list(tensor.shape) for name, tensor in state.items() if name.startswith("position.")}
                for state in (model.state_dict(), weights)
            )
            if now != then:
                raise CheckpointError(
                    f"{config.model.method} has the parameters {now or 'none'} but {folder} was trained with {then or 'none'}; "
                    "pass the file as it was in training"
                )
        model.load_state_dict(weights)
    return model.eval(), config


def checkpoint_method(path: Path) -> str:
    """The `model.method` of a checkpoint, without importing it."""
    folder = step_folder(path)
    with _undamaged(folder, "config.json", KeyError, TypeError):
        return str(_manifest(folder)["config"]["model"]["method"])


def load_checkpoint_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the text that the model was trained on.

    Args:
        path: as for `load_checkpoint`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    folder = step_folder(path)
    _verify(folder, "tokenizer.json")
    with _undamaged(folder, "tokenizer.json", CorpusError):
        return load_tokenizer(folder / "tokenizer.json")


def newest(run_folder: Path) -> Path | None:
    """The folder of the newest step, or None."""
    if not run_folder.is_dir():
        return None
    steps = [folder for folder in run_folder.iterdir() if _STEP.fullmatch(folder.name)]
    return max(steps, key=lambda folder: int(folder.name.removeprefix("step-")), default=None)


def step_folder(path: Path) -> Path:
    """The folder that `load_checkpoint` reads: of a step itself, or of the newest step of a run.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    folder = path if (path / "config.json").exists() else newest(path)
    if folder is None:
        found = "holds no checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {found}; pass a folder below checkpoints/ that alibi run has written")
    return folder


def stored_tokens(path: Path) -> Path | None:
    """The tokenized texts in the output folder of a checkpoint's run, if they are still there."""
    return next((folder / "tokens" for folder in path.resolve().parents if (folder / "tokens").is_dir()), None)


def save_checkpoint(run_folder: Path, training: Training, progress: Progress, tokenizer: Tokenizer) -> Path:
    """Write the step's folder, after the last step without the other state, and remove older ones.

    Every process must call this; the first one writes the shared files.

    Raises:
        CheckpointError: it cannot be written; partial files are removed.
    """
    final, finished = run_folder / f"step-{progress.step:08d}", progress.step == training.config.train.steps
    first, wait = training.accelerator.is_main_process, training.accelerator.wait_for_everyone
    try:
        with contextlib.ExitStack() as stack:
            # All processes write into the first one's folder.
            (temporary,) = broadcast_object_list([stack.enter_context(new_folder(final)) if first else None])
            if first and not finished:
                (temporary / "state").mkdir()
            wait()
            weights = training.weights()
            if not finished:
                save_state(temporary / "state", training)
            if first:
                tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
                save_file(tensors, temporary / "model.safetensors")
            wait()
            if first:
                replace_file(temporary / "tokenizer.json", tokenizer.dump())
                config, facts = to_json(training.config), source_facts(training.config.model.method)
                about = {"schema": SCHEMA, "config": config, "progress": finite(dataclasses.asdict(progress))}
                sealed_folder.seal(temporary, "config.json", about | ({"method": facts} if facts else {}))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{final} cannot be written ({_first_line(error)}); make room, or the folder writable, then run the same "
            "command again: "
            + ("it goes on from " + older.name if (older := newest(run_folder)) else "it begins again")
        ) from error
    if first:
        remove_leftovers(run_folder)
        for folder in run_folder.iterdir():
            if folder != final and _STEP.fullmatch(folder.name):
                shutil.rmtree(folder)
    wait()
    return final


def load_progress(folder: Path, config: RunConfig) -> Progress:
    """The progress of this checkpoint's training.

    Raises:
        CheckpointError: damaged, of another schema, or trained with another config (only the test may differ).
    """
    found, progress = _read(folder)
    for section in ("model", "data", "train"):
        trained_with = vars(getattr(found, section))
        for name, value in vars(getattr(config, section)).items():
            if trained_with[name] != value:
                raise CheckpointError(
                    f"{folder} was trained with {section}.{name} = {trained_with[name]!r}, not {value!r}; "
                    "pass another folder, or the config that began it"
                )
    return progress


def resume(folder: Path, training: Training) -> None:
    """Load the saved weights and optimizer state into the prepared training.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    files = _manifest(folder)["files"]
    with _undamaged(folder, "state", *_READ_ERRORS):
        if not any(name.startswith("state/") for name in files):
            raise FileNotFoundError("it holds a finished model only")
        _verify(folder, *files)
        load_state(folder / "state", folder / "model.safetensors", training)


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
        _READ_ERRORS: the state cannot be read, or belongs to another model.
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


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        with _undamaged(folder, "config.json", sealed_folder.DamagedError, AttributeError, KeyError):
            about = sealed_folder.read_sealed(folder, "config.json", schema=SCHEMA)
            if about["schema"] != SCHEMA:
                about["files"] = {name: {"sha256": digest} for name, digest in about["sha256"].items()}
            return about
    except sealed_folder.SchemaError as error:
        found = parse((folder / "config.json").read_bytes())
        if isinstance(found, dict) and "model_type" in found:
            raise CheckpointError(
                f"{folder} holds a model of transformers, but alibi generate and alibi eval are for models that alibi run has "
                "trained; load it with transformers, call alibi_attn.hf.patch(model), then model.generate, or compute the "
                "perplexity of a text with alibi eval-text"
            ) from None
        raise CheckpointError(f"{error}; pass a folder that this version of alibi run has written") from None


def _read(folder: Path, method: str | None = None) -> tuple[RunConfig, Progress]:
    """The config, with the given position method instead of its own, if any, and the progress."""
    about = _manifest(folder)
    with _undamaged(folder, "config.json", ConfigError, AttributeError, KeyError, TypeError, ValueError):
        about["config"]["model"]["method"] = method or about["config"]["model"]["method"]
        return from_json(about["config"]), Progress(**about["progress"])


def _verify(folder: Path, *names: str) -> None:
    files = _manifest(folder)["files"]
    for name in names:
        with _undamaged(folder, name, sealed_folder.DamagedError):
            sealed_folder.verify(folder, name, files.get(name, {"sha256": ""}))


@contextlib.contextmanager
def _undamaged(folder: Path, name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds mean that this file is damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except kinds as error:
        raise CheckpointError(
            f"{folder / name} is damaged or incomplete ({_first_line(error)}); delete {folder} and train again"
        ) from None


def _first_line(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch wraps the OSError of a full disk
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__
