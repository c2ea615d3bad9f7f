"""Run a recipe: train what is not trained, evaluate what is not evaluated, and write a record of each.

    <out>/records/*.json                          one per training and one per evaluation
    <out>/checkpoints/<name>-<identity>/step-…/   see `checkpoint.py`
    <out>/tokens/<identity>/                      see `token_store.py`
    <out>/tensorboard/<name>/                     where it is asked for

What is recorded already is skipped and what was cut is resumed, so that running a recipe again is always right. Runs that
differ only in their test share one training; recipes of one study share theirs in one folder.
"""

import contextlib
import datetime
import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from alibi_attn import records
from alibi_attn.lab import checkpoint
from alibi_attn.lab.config import TASK_CORPUS, ConfigError, DataConfig, EvalConfig, Recipe, RunConfig, Scale
from alibi_attn.lab.data import Corpus, CorpusError, load_corpus, num_pieces
from alibi_attn.lab.evaluate import scored_stretches
from alibi_attn.lab.fields import override, to_json
from alibi_attn.lab.model import LanguageModel
from alibi_attn.lab.positions import check_segments, check_stretch
from alibi_attn.lab.streams import all_curves
from alibi_attn.lab.train import train
from alibi_attn.records import Json

SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal that could show a bar
PATIENCE = datetime.timedelta(hours=12)  # of the other processes, which wait while the first one reads and evaluates


class ExperimentError(ValueError):
    """A folder that cannot be written, or in which another experiment runs; or a package that is not there."""


def run(
    recipe: Recipe,
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    shard: tuple[int, int] = (0, 1),
    console: Console | None = None,
    track: bool = False,
) -> list[Path]:
    """Every run of the recipe, trained, evaluated and recorded; the records' paths, two per run.

    Args:
        out: folder for records and checkpoints; a second experiment in it is refused while the first one runs.
        overrides: fields to change in every run, by name: {"train.steps": "50"}.
        seeds: repeat every run with these seeds, instead of the one that the recipe says.
        shard: (i, n): only the runs of every n-th training, from training i on; other shards may run in the same folder at the
            same time. The paths are then those of all runs that are recorded, by whomever.
        console: where progress is shown; None shows nothing.
        track: also show losses in TensorBoard, below `out`/tensorboard.

    Raises:
        ExperimentError: `out` cannot be written, another experiment runs in it, or TensorBoard is not installed.
        ConfigError, CorpusError, CheckpointError, TrainingError, EvaluationError: see there.
    """
    console = console or Console(quiet=True)
    configs = _configs(recipe, scale, overrides or {}, seeds)
    mine, study = runs_of_shard(configs, shard), recipe.study or recipe.name
    if track and importlib.util.find_spec("tensorboard") is None:
        raise ExperimentError(
            'tracking needs the tensorboard package; install it with: pip install "alibi-attn[track]"'
        )
    state = processes()
    if not state.is_main_process:
        console = Console(quiet=True)
    paths: list[Path] = []
    with _alone_in(out, shard) if state.is_main_process else contextlib.nullcontext():
        corpora: dict[DataConfig, Corpus] = {}
        for config in configs:  # all that can be wrong with the text is said before anything is trained
            if config.data not in corpora:
                console.print(f"[dim]reading {escape(_named(config.data))}, tokens: {config.data.tokenizer}[/]")
                with state.main_process_first(), _one_shard_at_a_time(out, shard):
                    corpora[config.data] = load_corpus(config.data, out / "tokens")
            _check(config, corpora[config.data])
        for config in mine:
            paths += _run_one(study, config, corpora[config.data], out, console, track)
        if state.is_main_process:
            for config in (config for config in configs if config not in mine):
                found = _recorded(study, config, corpora[config.data], out)
                if not all(found):
                    console.print(f"[bold]{_said(study, config)}[/] is still missing: it is another shard's")
                paths += [path for path in found if path is not None] if all(found) else []
    return paths


def runs_of_shard(configs: Sequence[RunConfig], shard: tuple[int, int]) -> list[RunConfig]:
    """The runs of every n-th training, from training i on; runs that share a training stay together.

    Raises:
        ConfigError: a shard that there is not.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"shard {index}/{count} is none of {count}: they are 0/{count} to {count - 1}/{count}")
    trainings = list(dict.fromkeys((config.model, config.data, config.train) for config in configs))
    mine = set(trainings[index::count])
    return [config for config in configs if (config.model, config.data, config.train) in mine]


def num_runs(recipe: Recipe, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int]) -> int:
    """How many runs of the recipe `run` would record, two records each, without a shard."""
    return len(_configs(recipe, scale, overrides, seeds))


def processes() -> PartialState:
    """This process among those that the launcher started; accelerate sees torchrun on CPUs only if told that they are CPUs."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def run_name(study: str, config: RunConfig) -> str:
    """The name of a run's records: `study` is the recipe's, or the recipe's own name where it has none.

    >>> run_name("quick", RunConfig())
    'quick/alibi-128/seed-0'
    """
    return f"{study}/{config.model.method}-{config.train.length}/seed-{config.train.seed}"


def checkpoint_folder(out: Path, study: str, config: RunConfig, corpus: Corpus) -> Path:
    """Where `run` keeps the checkpoints of a training, by its name and all that was asked of it but the test."""
    name = run_name(study, config)
    _, trained = _identities(config, corpus)
    return out / "checkpoints" / f"{name}-{records.identity('training', name, trained)}"


def _configs(recipe: Recipe, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int]) -> list[RunConfig]:
    configs = [override(config, overrides) for config in recipe.runs(scale)]
    if seeds:
        configs = [override(config, {"train.seed": str(seed)}) for seed in seeds for config in configs]
    if len({config.train.precision for config in configs}) > 1:
        raise ConfigError("the runs of one experiment must share train.precision; run them as separate experiments")
    for config in configs:
        check_stretch(config.model.method, config.eval.stretch)
        if config.data.segments:
            check_segments(config.model.method)
    return list(dict.fromkeys(configs))


def _said(study: str, config: RunConfig) -> str:
    """What a run is called to its user: the name of its records, and the task where it has one."""
    name = escape(run_name(study, config))
    return f"{name} on {config.data.corpus}" if TASK_CORPUS.fullmatch(config.data.corpus) else name


def _named(data: DataConfig) -> str:
    return ", ".join(data.text) if data.text else data.corpus


def _check(config: RunConfig, corpus: Corpus) -> None:
    """Raises ConfigError or CorpusError where the run cannot be made of this corpus."""
    for length in (config.train.first_length or config.train.length, config.train.length):
        num_pieces(corpus.train, length)
    scored_stretches(len(_test_text(config, corpus)), config.eval)
    if config.train.validate_every:
        length = config.train.validate_length or config.train.length
        scored_stretches(len(corpus.valid), EvalConfig(lengths=(length,)))
    needed = corpus.tokenizer.vocab_size
    if needed > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} but {config.data.tokenizer!r} made {needed} tokens of this text; "
            f"pass model.vocab_size={needed}"
        )


def _test_text(config: RunConfig, corpus: Corpus) -> Tensor:
    if config.eval.split == "valid":
        return corpus.valid
    if corpus.test is None:
        raise CorpusError(
            'eval.split is "test" but the corpus has no test text; pass data.test_share, or eval.split=valid'
        )
    return corpus.test


def _run_one(study: str, config: RunConfig, corpus: Corpus, out: Path, console: Console, track: bool) -> list[Path]:
    name, said, folder = run_name(study, config), _said(study, config), out / "records"
    asked, trained = _identities(config, corpus)
    training, evaluation = _recorded(study, config, corpus, out)
    if training and evaluation:
        console.print(f"[bold]{said}[/] is recorded already")
        return [training, evaluation]
    checkpoints = checkpoint_folder(out, study, config, corpus)
    started = datetime.datetime.now(datetime.UTC)
    with _tracked(name, config, out) if track else contextlib.nullcontext(_tell_nobody) as tell:
        progress = _train(said, config, corpus, checkpoints, console, tell)
    if not PartialState().is_main_process:
        return []
    model, _ = checkpoint.load_checkpoint(checkpoints)
    if not training:
        metrics: dict[str, float | None] = {
            "loss_nats": progress.loss_nats,
            "tokens": progress.step * config.train.batch_tokens,
            "tokens_per_second": _tokens_per_second(config, progress),
            "seconds": progress.seconds,
            "peak_memory_bytes": progress.peak_memory_bytes,
            "parameters": model.num_parameters(),
        }
        training = records.save(
            records.make("training", name, config=trained, metrics=metrics, curves=_curves(progress), started=started),
            folder,
        )
    if not evaluation:
        with console.status(f"{said}: testing at {', '.join(map(str, config.eval.lengths))}"):
            evaluation = _evaluate(name, config, corpus, model.to(PartialState().device), asked, folder, console)
    return [training, evaluation]


def _identities(config: RunConfig, corpus: Corpus) -> tuple[dict[str, Json], dict[str, Json]]:
    """What an evaluation is the answer to, and what its training is."""
    asked = {**to_json(config), "corpus": corpus.facts}
    return asked, {key: value for key, value in asked.items() if key != "eval"}


def _recorded(study: str, config: RunConfig, corpus: Corpus, out: Path) -> tuple[Path | None, Path | None]:
    """The records of a run, of its training and of its evaluation, where they are there."""
    name, folder = run_name(study, config), out / "records"
    asked, trained = _identities(config, corpus)
    return records.recorded(folder, "training", name, trained), records.recorded(folder, "evaluation", name, asked)


def _curves(progress: checkpoint.Progress) -> dict[str, Mapping[str, Sequence[float]]]:
    return {"training": progress.curve} | ({"validation": progress.validation} if progress.validation["step"] else {})


def _train(
    said: str,
    config: RunConfig,
    corpus: Corpus,
    folder: Path,
    console: Console,
    tell: Callable[[checkpoint.Progress], None],
) -> checkpoint.Progress:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:.3f} nats  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(said, total=config.train.steps, loss=float("nan"), speed=0.0)
        last = time.monotonic()
        first: checkpoint.Progress | None = None

        def show(progress: checkpoint.Progress) -> None:
            nonlocal last, first
            first = first or progress
            speed = _tokens_per_second(config, progress, since=first)
            bar.update(task, completed=progress.step, loss=progress.loss_nats, speed=speed)
            if not console.is_terminal and time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                left = (config.train.steps - progress.step) * config.train.batch_tokens / speed
                console.print(
                    f"{said}: step {progress.step:,} of {config.train.steps:,}, {progress.loss_nats:.3f} nats, "
                    f"{speed:,.0f} tokens/s, {left / 60:.0f} min left",
                    soft_wrap=True,
                )

        def show_and_tell(progress: checkpoint.Progress) -> None:
            show(progress)
            tell(progress)

        progress = train(config, corpus, folder, on_step=show_and_tell)
        show(progress)
    return progress


def _tokens_per_second(
    config: RunConfig, progress: checkpoint.Progress, *, since: checkpoint.Progress | None = None
) -> float:
    """Of the steps `since` then, as after a training was resumed; of all where there are none since."""
    start = since if since and since.step < progress.step else checkpoint.Progress()
    return (progress.step - start.step) * config.train.batch_tokens / (progress.seconds - start.seconds)


def _evaluate(
    name: str,
    config: RunConfig,
    corpus: Corpus,
    model: LanguageModel,
    asked: Mapping[str, Json],
    folder: Path,
    console: Console,
) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    curves = all_curves(
        model,
        _test_text(config, corpus),
        config.eval,
        encode=lambda text: corpus.tokenizer.encode(text).tolist(),
        say=lambda sentence: console.print(f"  {escape(sentence)}"),
    )
    record = records.make(
        "evaluation",
        name,
        config=asked,
        metrics={"parameters": model.num_parameters()},
        curves=curves,
        started=started,
    )
    path = records.save(record, folder)
    console.print(f"  nats per token {_summary(curves['by_length'])}  ({record.seconds:.0f} s)")
    return path


@contextlib.contextmanager
def _tracked(name: str, config: RunConfig, out: Path) -> Iterator[Callable[[checkpoint.Progress], None]]:
    """Gives TensorBoard, through accelerate, each point of the curves as it is made."""
    cpu = not torch.accelerator.is_available()
    folder = str(out / "tensorboard")
    accelerator = Accelerator(
        mixed_precision=config.train.precision, cpu=cpu, log_with="tensorboard", project_dir=folder
    )
    accelerator.init_trackers(name)

    def tell(progress: checkpoint.Progress) -> None:
        for curve, columns in _curves(progress).items():
            if columns["step"][-1:] == [progress.step]:
                points = {f"{curve}/{column}": values[-1] for column, values in columns.items() if column != "step"}
                accelerator.log(points, step=progress.step)

    try:
        yield tell
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def _tell_nobody(progress: checkpoint.Progress) -> None:
    pass


def _summary(by_length: Mapping[str, Sequence[Json]]) -> str:
    pairs = zip(by_length["length"], by_length["nonoverlapping_nats"], strict=True)
    return "  ".join(f"{length}: " + (f"{nats:.3f}" if isinstance(nats, float) else "–") for length, nats in pairs)


def _one_shard_at_a_time(out: Path, shard: tuple[int, int]) -> contextlib.AbstractContextManager[object]:
    """Whoever comes first makes the tokens, and the others wait for them."""
    return FileLock(out / ".lock-tokens") if shard[1] > 1 and processes().is_main_process else contextlib.nullcontext()


@contextlib.contextmanager
def _alone_in(out: Path, shard: tuple[int, int]) -> Iterator[None]:
    sharded = shard[1] > 1
    lock = FileLock(out / (f".lock-{shard[0]}-of-{shard[1]}" if sharded else ".lock"), timeout=0)
    made = next((folder for folder in (*reversed(out.parents), out) if not folder.exists()), None)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ExperimentError(f"another experiment is running in {out}; wait for it, or pass another folder") from None
    except OSError as error:
        raise ExperimentError(f"{out} cannot be written ({error.strerror}); pass a folder that you may write") from None
    try:
        yield
    except (CorpusError, ConfigError):
        if made and not sharded and not (out / "records").exists() and not (out / "checkpoints").exists():
            shutil.rmtree(made, ignore_errors=True)  # refused before any work: no folder stays that was not there
        raise
    finally:
        lock.release()
