"""One run of an experiment: trains and tests what has no record yet, and saves one record of each.

An interrupted training is resumed from its checkpoint; a finished one is only tested. A terminal shows the progress as a bar,
with the time that is left; elsewhere it is a line from time to time. Trackers, TensorBoard or Weights & Biases, get the losses
through accelerate. `experiment.py` runs those of a recipe, and `ray_trainings.py` runs several on a cluster.
"""

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from alibi_lab import records
from alibi_lab.lab.config import TASK_CORPUS, ConfigError, Method, RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.evaluation.evaluate import all_curves, own_curves, scored_stretches
from alibi_lab.lab.model.method_checks import source_facts
from alibi_lab.lab.training.checkpoint import Progress, load_checkpoint
from alibi_lab.lab.training.flops import full_tokens_per_second, matrix_flops_per_second
from alibi_lab.lab.training.train import num_pieces, train
from alibi_lab.records import Json

# Of a run in its experiment: "model 1 of 4" or "", and the number of tokens in later trainings.
Place: TypeAlias = tuple[str, int]

SECONDS_BETWEEN_LINES = 30  # if there is no terminal for a bar
WIDE = 140  # columns of a terminal with room for everything
_BEFORE_NAME = 47  # columns: "100,000/100,000", the bar, the time, "10.000 nats"


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One training and its test, in an output folder; made by `make_run`.

    Args:
        name: the name of its records.
        title: its title for display.
        training, evaluation: the configs that identify its records; the first one is without the test.
        identities: the hashes of these two.
        checkpoints: the folder of its training's checkpoints.
    """

    config: RunConfig
    corpus: Corpus
    out: Path
    name: str
    title: str
    training: Mapping[str, Json]
    evaluation: Mapping[str, Json]
    identities: tuple[str, str]
    checkpoints: Path

    def recorded(self) -> tuple[Path | None, Path | None]:
        """The paths of its training's and its evaluation's record; None for one that does not exist."""
        training, evaluation = (records.with_identity(self.out / "records", digits) for digits in self.identities)
        return training, evaluation

    def missing(self) -> tuple[str, ...]:
        """Its missing records: "training", "evaluation", both or none.

        A recorded training is missing too if the evaluation is missing and the trained model was deleted: it would run again.
        """
        training, evaluation = self.recorded()
        trains = training is None or not (evaluation or self.checkpoints.is_dir())
        return (*(["training"] if trains else []), *([] if evaluation else ["evaluation"]))


def make_run(study: str, config: RunConfig, corpus: Corpus, out: Path) -> Run:
    """The run of a config in an output folder; `study` as in `run_name`.

    Raises:
        ConfigError, CorpusError: the run is not possible with this corpus.
    """
    name = run_name(study, config.model.method, config.train.length, config.train.seed)
    title, facts = run_title(name, config.data.corpus), source_facts(config.model.method)
    for length in (config.train.first_length or config.train.length, config.train.length):
        num_pieces(corpus.train, length)
    scored_stretches(len(corpus.to_test_on(config.eval.split).valid), config.eval.lengths[-1])
    if config.train.validate_every:
        scored_stretches(len(corpus.valid), config.train.validate_length or config.train.length)
    needed = corpus.tokenizer.vocab_size
    if needed > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} but {config.data.tokenizer!r} made {needed} tokens of this text; "
            f"pass model.vocab_size={needed}"
        )
    evaluation = {**to_json(config), "corpus": corpus.facts, **({"method": facts} if facts else {})}
    training = {key: value for key, value in evaluation.items() if key != "eval"}
    identities = records.identity("training", name, training), records.identity("evaluation", name, evaluation)
    checkpoints = out / "checkpoints" / f"{name}-{identities[0]}"
    return Run(config, corpus, out, name, title, training, evaluation, identities, checkpoints)


def run_name(study: str, method: Method, length: int, seed: int) -> str:
    """The name of a run's records; `study` is the recipe's study, or the recipe's name if it belongs to none.

    >>> run_name("quick", "alibi", 128, 0)
    'quick/alibi-128/seed-0'
    """
    return f"{study}/{method.rpartition(':')[2]}-{length}/seed-{seed}"  # of an imported method its class


def run_title(name: str, corpus: str) -> str:
    """The run's title for display: the name of its records, and its task if it trains on one."""
    return f"{escape(name)} on {corpus}" if TASK_CORPUS.fullmatch(corpus) else escape(name)


def run_once(run: Run, console: Console, track: str, place: Place = ("", 0)) -> list[Path]:
    """The paths of the run's two records, which are made unless they exist; none in other processes than the first."""
    training, evaluation = run.recorded()
    if training and evaluation:
        console.print(f"[bold]{run.title}[/] is recorded already")
        return [training, evaluation]
    began, folder, test = datetime.datetime.now(datetime.UTC), run.out / "records", run.config.eval
    metrics, curves = _train(run, console, track, place)
    if not PartialState().is_main_process:
        return []
    model, _ = load_checkpoint(run.checkpoints, method=run.config.model.method)
    size = {"parameters": model.num_parameters()}
    if not training:
        metrics |= size
        record = records.make("training", run.name, config=run.training, metrics=metrics, curves=curves, started=began)
        training = records.save(record, folder)
    if not evaluation:

        def say(sentence: str) -> None:
            # Below the progress bar; without a terminal, with the run's title, because several runs may share a log.
            console.print(f"{'' if console.is_terminal else run.title + ':'}  {escape(sentence)}", soft_wrap=True)

        began = datetime.datetime.now(datetime.UTC)
        with console.status(f"{run.title}: testing at {', '.join(map(str, test.lengths))}"):
            model, corpus = model.to(PartialState().device), run.corpus.to_test_on(test.split)
            found = all_curves(model, corpus, test, say=say)
            if hasattr(type(model.position), "curves"):
                found |= own_curves(type(model.position), model, corpus, test)
        record = records.make("evaluation", run.name, config=run.evaluation, metrics=size, curves=found, started=began)
        evaluation = records.save(record, folder)
        pairs = zip(found["by_length"]["length"], found["by_length"]["nonoverlapping_nats"], strict=True)
        shown = (f"{length}: " + (f"{nats:.3f}" if isinstance(nats, float) else "–") for length, nats in pairs)
        say(f"nats per token {'  '.join(shown)}  ({record.seconds:.0f} s)")
    return [training, evaluation]


def _train(run: Run, console: Console, track: str, place: Place) -> tuple[dict[str, float | None], records.Curves]:
    """The metrics and curves of the finished training; how well a GPU was used, without the first step, which compiles."""
    settings, state, first = run.config.train, PartialState(), None
    rate = matrix_flops_per_second(state.device, settings.precision)
    full_speed = full_tokens_per_second(run.config, rate * state.num_processes) if rate else None
    with _tracked(run, track) as log, _shown(run, console, place, full_speed) as show:

        def on_step(progress: Progress) -> None:
            nonlocal first
            first = first or progress
            show(progress, first)
            log(progress)

        progress = train(run.config, run.corpus, run.checkpoints, on_step=on_step)
        if console.is_terminal:  # a training that was already finished has called no callback
            show(progress, first)
    metrics = {
        "loss_nats": progress.loss_nats,
        "tokens": progress.step * settings.batch_tokens,
        "tokens_per_second": _tokens_per_second(settings.batch_tokens, progress),
        "seconds": progress.seconds,
        "peak_memory_bytes": progress.peak_memory_bytes,
    }
    if rate and full_speed:
        speed = _tokens_per_second(settings.batch_tokens, progress, since=first)
        metrics |= {"utilization": speed / full_speed, "matrix_flops_per_second": rate}
    return metrics, progress.curves()


@contextlib.contextmanager
def _shown(
    run: Run, console: Console, place: Place, full_speed: float | None
) -> Iterator[Callable[[Progress, Progress | None], None]]:
    """Shows each progress that is passed to the returned function, with the first one of this process, if any.

    Args:
        full_speed: tokens per second at a utilization (MFU) of 1; None if unknown.
    """
    (number, tokens_later), steps, batch_tokens = place, run.config.train.steps, run.config.train.batch_tokens
    name = f"{number}: {run.title}" if number else run.title
    is_wide = console.width >= WIDE
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=24 if is_wide else 10),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("[bold]{task.description}"),
        TextColumn("{task.fields[speed]}"),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        room = console.width - _BEFORE_NAME
        task = bar.add_task(name if is_wide else _shortened(name, room), total=steps, loss="", speed="")
        last = time.monotonic()

        def show(progress: Progress, first: Progress | None) -> None:
            nonlocal last
            speed = _tokens_per_second(batch_tokens, progress, since=first)
            left = (steps - progress.step) * batch_tokens / speed / 60
            in_all = f"{left + tokens_later / speed / 60:.0f} min for all models" if tokens_later else ""
            shown = f"{speed:,.0f} tokens/s" + (f", {speed / full_speed:.0%} MFU" if full_speed else "")
            fits = len(name) + len(shown) < room
            about = f"{shown}  {in_all}" if is_wide else shown if fits else ""
            bar.update(task, completed=progress.step, loss=f"{progress.loss_nats:.3f} nats", speed=about)
            late = time.monotonic() - last >= SECONDS_BETWEEN_LINES
            if not console.is_terminal and (late or progress.step == steps):
                last = time.monotonic()
                times = f"{left:.0f} min left{', ' if in_all else ''}{in_all}"
                line = f"{name}: step {progress.step:,} of {steps:,}, {progress.loss_nats:.3f} nats, {shown}, {times}"
                console.print(line, soft_wrap=True)

        yield show


@contextlib.contextmanager
def _tracked(run: Run, tracker: str) -> Iterator[Callable[[Progress], None]]:
    """Sends each point of the curves of a progress that is passed to the returned function; no tracker, "", sends none."""
    if not tracker:
        yield lambda progress: None
        return
    wandb, cpu = tracker == "wandb", not torch.accelerator.is_available()
    folder = str(run.out if wandb else run.out / "tensorboard")
    precision = run.config.train.precision
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, log_with=tracker, project_dir=folder)
    options = {"wandb": {"name": run.name, "dir": folder}}
    accelerator.init_trackers("alibi-attn" if wandb else run.name, dict(run.training) if wandb else None, options)

    def log(progress: Progress) -> None:
        for curve, columns in progress.curves().items():
            if columns["step"][-1:] == [progress.step]:
                points = {f"{curve}/{column}": values[-1] for column, values in columns.items() if column != "step"}
                accelerator.log(points, step=progress.step)

    try:
        yield log
    finally:
        for started in accelerator.trackers:
            started.finish()


def _tokens_per_second(batch_tokens: int, progress: Progress, *, since: Progress | None = None) -> float:
    """The speed over the steps after `since`, such as those after a resumption; over all steps if there are none."""
    start = since if since and since.step < progress.step else Progress()
    return (progress.step - start.step) * batch_tokens / (progress.seconds - start.seconds)


def _shortened(name: str, room: int) -> str:
    """The name in at most `room` characters, with its end, which tells runs apart."""
    return name if len(name) <= room else "…" + name[len(name) + 1 - max(room, 9) :]
