"""Runs a recipe: trains and evaluates what has no record yet, and saves a record of each training and evaluation.

    <out>/records/*.json                          one per training and one per evaluation
    <out>/checkpoints/<name>-<identity>/step-…/   see `training/checkpoint.py`
    <out>/tokens/<identity>/                      see `data/corpus.py`
    <out>/tensorboard/<name>/                     if requested

Runs that have records are skipped and interrupted trainings are resumed, so it is always safe to run a recipe again.
Runs that differ only in their test share one training; recipes of one study share trainings if they share the folder.
"""

import contextlib
import datetime
import importlib.util
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape

from alibi_lab.lab.config import ConfigError, DataConfig, Recipe, RunConfig, Selection
from alibi_lab.lab.data.corpus import Corpus, CorpusError, load_corpus
from alibi_lab.lab.data.tasks import TaskError
from alibi_lab.lab.model.method_trial import try_imported_methods
from alibi_lab.lab.planning import by_training, configs_of
from alibi_lab.lab.run import Run, make_run, run_once

PATIENCE = datetime.timedelta(hours=12)  # the other processes wait this long while the first one reads and evaluates
_LOCK = re.compile(r"\.lock(?:-(\d+)-of-(\d+))?")


class ExperimentError(ValueError):
    """A folder that cannot be written or is in use by another experiment, or a missing package."""


def run(
    recipe: Recipe,
    *,
    out: Path,
    shard: tuple[int, int] = (0, 1),
    on_ray: bool = False,
    console: Console | None = None,
    track: str = "",
    **selection: Unpack[Selection],
) -> list[Path]:
    """Trains, evaluates and records every run of the recipe, and returns the records' paths, two per run.

    Args:
        out: folder for records and checkpoints; a second experiment in it raises an error while the first one runs.
        shard: (i, n): only the runs of every n-th training, from training i on; other shards may run in the same folder at the
            same time. The returned paths then include the records made by other shards.
        on_ray: train on the connected Ray cluster (`ray_trainings.py`), one processor or GPU per training; all machines
            share `out`.
        console: where progress is shown; None shows nothing.
        track: "tensorboard" (in `out`/tensorboard) or "wandb" also sends the losses there.
        selection: the scale, and changes of the recipe's runs.

    Raises:
        ExperimentError: `out` cannot be written, another experiment runs in it, the `track` package is not installed,
            or a launcher started several processes for `on_ray`.
        ChildProcessError: Ray cannot go on.
        ConfigError, CorpusError, TaskError, CheckpointError, TrainingError, EvaluationError: see these classes.
    """
    study, configs = recipe.study or recipe.name, configs_of(recipe, **selection)
    trainings = by_training(configs, shard)
    if track and importlib.util.find_spec(track) is None:
        raise ExperimentError(f'tracking needs the {track} package; install it with: pip install ".[track]" in a clone')
    state = processes()
    if on_ray and state.num_processes > 1:
        raise ExperimentError(
            f"a launcher started {state.num_processes} processes, which share each training; omit Ray or the launcher"
        )
    console = console if console and state.is_main_process else Console(quiet=True)
    try_imported_methods(configs, state.device)
    with _alone_in(out, shard) if state.is_main_process else contextlib.nullcontext():
        runs = _with_their_texts(study, configs, out, console)
        models = [[runs.pop(config) for config in group] for group in trainings]
        left = [[one.config for one in group if on_ray and not all(one.recorded())] for group in models]
        if any(left):
            from alibi_lab.lab import ray_trainings

            ray_trainings.run_all(study, list(filter(None, left)), out=out, console=console, track=track)
        settings = [None if group[0].recorded()[0] else group[0].config.train for group in models]
        tokens = [train.steps * train.batch_tokens if train else 0 for train in settings]
        paths: list[Path] = []
        for number, group in enumerate(models, 1):
            place = f"model {number} of {len(models)}" if len(models) > 1 else "", sum(tokens[number:])
            for one in group:  # what was made on Ray is recorded
                quiet = one.config in itertools.chain(*left)
                paths += run_once(one, Console(quiet=True) if quiet else console, track, place)
        for other in runs.values() if state.is_main_process else ():  # those of other shards
            training, evaluation = other.recorded()
            if training and evaluation:
                paths += [training, evaluation]
            else:
                console.print(f"[bold]{other.title}[/] is still missing: it is another shard's")
    return paths


@contextlib.contextmanager
def _alone_in(out: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Holds the folder for this shard. An experiment that cannot begin removes the folders that it made.

    Raises:
        ExperimentError: the folder cannot be written, or another experiment runs in it.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out, shard)
    except OSError as error:
        raise ExperimentError(f"{out} cannot be written ({error.strerror}); pass a folder that you may write") from None
    try:
        yield
    except (CorpusError, ConfigError, TaskError):
        if made and shard[1] == 1 and not (out / "records").exists() and not (out / "checkpoints").exists():
            shutil.rmtree(out, ignore_errors=True)  # nothing was done yet: remove a folder that is new
            with contextlib.suppress(OSError):  # other experiments may have used the folders above it since
                for folder in made[1:]:
                    folder.rmdir()
        raise
    finally:
        lock.release()


def _lock(out: Path, shard: tuple[int, int]) -> FileLock:
    """Acquires and returns this shard's lock; only other shards of the same count may hold theirs at the same time.

    Raises:
        ExperimentError: another experiment in this folder may write the same files; the error names its shard.
    """
    index, count = shard
    mine = ".lock" if count == 1 else f".lock-{index}-of-{count}"
    with FileLock(out / ".lock-start"):  # if two start at once, the second one sees the first one's lock
        others = sorted(path for path in out.glob(".lock*") if path.name != mine)
        for path in [*others, out / mine]:
            found = _LOCK.fullmatch(path.name)
            if not found or (path.name != mine and found[2] == str(count) != "1"):
                continue
            lock = FileLock(path, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                running = f"shard {found[1]}/{found[2]} of an experiment" if found[1] else "another experiment"
                also = f" (shards i/{found[2]} may run at the same time)" if found[1] else ""
                advice = f"wait for it, or pass another folder{also}"
                raise ExperimentError(f"{running} is running in {out}; {advice}") from None
            if path.name != mine:
                lock.release()
    return lock


def _with_their_texts(study: str, configs: Sequence[RunConfig], out: Path, console: Console) -> dict[RunConfig, Run]:
    """The runs of these configs. Errors in a text are raised before anything is trained."""
    corpora: dict[DataConfig, Corpus] = {}
    for data in dict.fromkeys(config.data for config in configs):
        console.print(f"[dim]reading {escape(', '.join(data.text) or data.corpus)}, tokens: {data.tokenizer}[/]")
        with PartialState().main_process_first():
            corpora[data] = load_corpus(data, out / "tokens")
    return {config: make_run(study, config, corpora[config.data], out) for config in configs}


def processes() -> PartialState:
    """This process among those of the launcher; accelerate detects torchrun on CPUs only with `cpu=True`."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
