"""Runs a recipe: trains and evaluates what has no record yet, and saves a record of each training and evaluation.

    <out>/records/*.json                          one per training and one per evaluation
    <out>/checkpoints/<name>-<identity>/step-…/   see `training/checkpoint.py`
    <out>/tokens/<identity>/                      see `token_store.py`
    <out>/tensorboard/<name>/                     if requested

Runs that have records are skipped and interrupted trainings are resumed, so it is always safe to run a recipe again.
Runs that differ only in their test share one training; recipes of one study share trainings if they share the folder.
"""

import contextlib
import datetime
import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape

from alibi_lab.lab.config import ConfigError, DataConfig, EvalConfig, Recipe, RunConfig, Scale
from alibi_lab.lab.config_io import override
from alibi_lab.lab.data.corpus import Corpus, CorpusError, load_corpus, num_pieces
from alibi_lab.lab.data.symbol_tasks import TaskError
from alibi_lab.lab.evaluation.evaluate import scored_stretches
from alibi_lab.lab.model.method_trial import try_imported_methods
from alibi_lab.lab.model.positions import check_segments, check_stretch, stretches_of
from alibi_lab.lab.run import Place, recorded, run_once, run_title, test_text

PATIENCE = datetime.timedelta(hours=12)  # the other processes wait this long while the first one reads and evaluates


_LOCK = re.compile(r"\.lock(?:-(\d+)-of-(\d+))?")


class ExperimentError(ValueError):
    """A folder that cannot be written or is in use by another experiment, or a missing package."""


def run(
    recipe: Recipe,
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
    shard: tuple[int, int] = (0, 1),
    on_ray: bool = False,
    console: Console | None = None,
    track: str = "",
) -> list[Path]:
    """Trains, evaluates and records every run of the recipe, and returns the records' paths, two per run.

    Args:
        out: folder for records and checkpoints; a second experiment in it raises an error while the first one runs.
        overrides: fields to change in every run, by name: {"train.steps": "50"}.
        seeds: repeat every run with these seeds instead of the recipe's.
        methods: repeat every run with these position methods instead of the recipe's.
        shard: (i, n): only the runs of every n-th training, from training i on; other shards may run in the same folder at the
            same time. The returned paths then include the records made by other shards.
        on_ray: train on the connected Ray cluster (`ray_trainings.py`), one processor or GPU per training; all machines
            share `out`.
        console: where progress is shown; None shows nothing.
        track: "tensorboard" (in `out`/tensorboard) or "wandb" also sends the losses there.

    Raises:
        ExperimentError: `out` cannot be written, another experiment runs in it, the `track` package is not installed,
            or a launcher started several processes for `on_ray`.
        ChildProcessError: Ray cannot go on.
        ConfigError, CorpusError, TaskError, CheckpointError, TrainingError, EvaluationError: see these classes.
    """
    console = console or Console(quiet=True)
    configs = configs_of(recipe, scale, overrides or {}, seeds, methods)
    mine, study = runs_of_shard(configs, shard), recipe.study or recipe.name
    if track and importlib.util.find_spec(track) is None:
        raise ExperimentError(f'tracking needs the {track} package; install it with: pip install "alibi-attn[track]"')
    state = processes()
    if on_ray and state.num_processes > 1:
        raise ExperimentError(
            f"a launcher started {state.num_processes} processes, which share each training; omit Ray or the launcher"
        )
    if not state.is_main_process:
        console = Console(quiet=True)
    try_imported_methods(configs, state.device)
    paths: list[Path] = []
    with _alone_in(out, shard) if state.is_main_process else contextlib.nullcontext():
        corpora: dict[DataConfig, Corpus] = {}
        for config in configs:  # errors in the text are raised before anything is trained
            if config.data not in corpora:
                console.print(f"[dim]reading {escape(_named(config.data))}, tokens: {config.data.tokenizer}[/]")
                with state.main_process_first():
                    corpora[config.data] = load_corpus(config.data, out / "tokens")
            _check(config, corpora[config.data])
        at_once = [one for one in mine if on_ray and not all(recorded(study, one, corpora[one.data], out))]
        if at_once:
            from alibi_lab.lab import ray_trainings

            ray_trainings.run_all(study, by_training(at_once), out=out, console=console, track=track)
        models = by_training(mine)
        for number, runs in enumerate(models, 1):
            later = [one for (one, *_) in models[number:] if not recorded(study, one, corpora[one.data], out)[0]]
            tokens_later = sum(one.train.steps * one.train.batch_tokens for one in later)
            place = Place(f"model {number} of {len(models)}" if len(models) > 1 else "", tokens_later)
            for config in runs:
                if config in at_once:
                    paths += [path for path in recorded(study, config, corpora[config.data], out) if path is not None]
                else:
                    paths += run_once(study, config, corpora[config.data], out, console, track, place)
        if state.is_main_process:
            for config in (config for config in configs if config not in mine):
                found = recorded(study, config, corpora[config.data], out)
                if not all(found):
                    console.print(f"[bold]{run_title(study, config)}[/] is still missing: it is another shard's")
                paths += [path for path in found if path is not None] if all(found) else []
    return paths


def processes() -> PartialState:
    """This process among those of the launcher; accelerate detects torchrun on CPUs only with `cpu=True`."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def runs_of_shard(configs: Sequence[RunConfig], shard: tuple[int, int]) -> list[RunConfig]:
    """The runs of every n-th training, from training i on; runs that share a training stay together.

    Raises:
        ConfigError: the shard does not exist.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"shard {index}/{count} is none of {count}: they are 0/{count} to {count - 1}/{count}")
    mine = {run for runs in by_training(configs)[index::count] for run in runs}
    return [config for config in configs if config in mine]


def num_runs(
    recipe: Recipe, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int], methods: Sequence[str] = ()
) -> int:
    """The number of runs that `run` would record without a shard, with two records each."""
    return len(configs_of(recipe, scale, overrides, seeds, methods))


def by_training(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """The runs grouped by training; runs of one group differ only in their tests."""
    groups: dict[object, list[RunConfig]] = {}
    for config in configs:
        groups.setdefault((config.model, config.data, config.train), []).append(config)
    return list(groups.values())


def configs_of(
    recipe: Recipe, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int], methods: Sequence[str]
) -> list[RunConfig]:
    """All runs of the recipe, with the given changes. Of a recipe's stretches each given method runs those that it has.

    Raises:
        ConfigError: an invalid field or value, or a position method that does not support the run.
    """
    configs = [override(config, overrides) for config in recipe.runs(scale)]
    if methods:
        repeated = [override(config, {"model.method": method}) for method in methods for config in configs]
        configs = [
            config
            for config in repeated
            if "eval.stretch" in overrides or config.eval.stretch in stretches_of(config.model.method)
        ]
    if seeds:
        configs = [override(config, {"train.seed": str(seed)}) for seed in seeds for config in configs]
    if len({config.train.precision for config in configs}) > 1:
        raise ConfigError("the runs of one experiment must share train.precision; run them as separate experiments")
    for config in configs:
        check_stretch(config.model.method, config.eval.stretch)
        if config.data.segments:
            check_segments(config.model.method)
    return list(dict.fromkeys(configs))


def _named(data: DataConfig) -> str:
    return ", ".join(data.text) if data.text else data.corpus


def _check(config: RunConfig, corpus: Corpus) -> None:
    """Raises ConfigError or CorpusError if the run is not possible with this corpus."""
    for length in (config.train.first_length or config.train.length, config.train.length):
        num_pieces(corpus.train, length)
    scored_stretches(len(test_text(config, corpus)), config.eval)
    if config.train.validate_every:
        length = config.train.validate_length or config.train.length
        scored_stretches(len(corpus.valid), EvalConfig(lengths=(length,)))
    needed = corpus.tokenizer.vocab_size
    if needed > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} but {config.data.tokenizer!r} made {needed} tokens of this text; "
            f"pass model.vocab_size={needed}"
        )


@contextlib.contextmanager
def _alone_in(out: Path, shard: tuple[int, int]) -> Iterator[None]:
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
    mine = _lock_name(*shard)
    with FileLock(out / ".lock-start"):  # if two start at once, the second one sees the first one's lock
        for path in sorted({out / mine, *out.glob(".lock*")}):
            found = _LOCK.fullmatch(path.name)
            if not found or (path.name != mine and found[2] == str(shard[1]) != "1"):
                continue
            lock = FileLock(path, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                running = f"shard {found[1]}/{found[2]} of an experiment" if found[1] else "another experiment"
                raise ExperimentError(
                    f"{running} is running in {out}; wait for it, or pass another folder"
                    + (f" (shards i/{found[2]} may run at the same time)" if found[1] else "")
                ) from None
            if path.name == mine:
                kept = lock
            else:
                lock.release()
    return kept


def _lock_name(index: int, count: int) -> str:
    return ".lock" if count == 1 else f".lock-{index}-of-{count}"
