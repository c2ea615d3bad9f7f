"""One run of an experiment: trains a model, tests it, and saves one record of each unless it exists.

An interrupted training is resumed from its checkpoint; a finished one is only tested. `experiment.py` plans the runs,
and `ray_trainings.py` runs several on a cluster.
"""

import contextlib
import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from alibi_lab import records
from alibi_lab.lab.config import TASK_CORPUS, RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.data.corpus import Corpus, CorpusError
from alibi_lab.lab.evaluation.long_context_eval import all_curves, own_curves
from alibi_lab.lab.model.imported_method import source_facts
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.training import checkpoint
from alibi_lab.lab.training.train import train
from alibi_lab.records import Json

SECONDS_BETWEEN_LINES = 30  # of progress, if there is no terminal for a progress bar


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a run in its experiment, for the progress display.

    Args:
        name: "model 1 of 4", or empty.
        tokens_later: number of tokens in the trainings that follow this one.
    """

    name: str = ""
    tokens_later: int = 0


def run_name(study: str, config: RunConfig) -> str:
    """The name of a run's records; `study` is the recipe's study, or the recipe's name if it belongs to none.

    >>> run_name("quick", RunConfig())
    'quick/alibi-128/seed-0'
    """
    method = config.model.method.rpartition(":")[2]  # an imported method's class
    return f"{study}/{method}-{config.train.length}/seed-{config.train.seed}"


def checkpoint_folder(out: Path, study: str, config: RunConfig, corpus: Corpus) -> Path:
    """The folder of a training's checkpoints, named after the run and a hash of its config without the test."""
    name = run_name(study, config)
    _, trained = _identities(config, corpus)
    return out / "checkpoints" / f"{name}-{records.identity('training', name, trained)}"


def run_title(study: str, config: RunConfig) -> str:
    """The run's title for display: the name of its records, and its task if it trains on one."""
    name = escape(run_name(study, config))
    return f"{name} on {config.data.corpus}" if TASK_CORPUS.fullmatch(config.data.corpus) else name


def test_text(config: RunConfig, corpus: Corpus) -> Tensor:
    if config.eval.split == "valid":
        return corpus.valid
    if corpus.test is None:
        raise CorpusError(
            'eval.split is "test" but the corpus has no test text; pass data.test_share, or eval.split=valid'
        )
    return corpus.test


def run_once(
    study: str, config: RunConfig, corpus: Corpus, out: Path, console: Console, track: str, place: Place = Place()
) -> list[Path]:
    name, title, folder = run_name(study, config), run_title(study, config), out / "records"
    asked, trained = _identities(config, corpus)
    training, evaluation = recorded(study, config, corpus, out)
    if training and evaluation:
        console.print(f"[bold]{title}[/] is recorded already")
        return [training, evaluation]
    checkpoints = checkpoint_folder(out, study, config, corpus)
    started = datetime.datetime.now(datetime.UTC)
    with _tracked(track, name, config, out) if track else contextlib.nullcontext(_no_tracking) as tell:
        progress = _train(title, config, corpus, checkpoints, console, tell, place)
    if not PartialState().is_main_process:
        return []
    model, _ = checkpoint.load_checkpoint(checkpoints, method=config.model.method)
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
        with console.status(f"{title}: testing at {', '.join(map(str, config.eval.lengths))}"):
            say = functools.partial(_say, console, title)
            evaluation = _evaluate(name, config, corpus, model.to(PartialState().device), asked, folder, say)
    return [training, evaluation]


def _identities(config: RunConfig, corpus: Corpus) -> tuple[dict[str, Json], dict[str, Json]]:
    """The configs that identify an evaluation and its training in their records."""
    facts = source_facts(config.model.method)
    asked = {**to_json(config), "corpus": corpus.facts, **({"method": facts} if facts else {})}
    return asked, {key: value for key, value in asked.items() if key != "eval"}


def recorded(study: str, config: RunConfig, corpus: Corpus, out: Path) -> tuple[Path | None, Path | None]:
    """The paths of a run's training record and evaluation record; None for one that does not exist."""
    name, folder = run_name(study, config), out / "records"
    asked, trained = _identities(config, corpus)
    return records.recorded(folder, "training", name, trained), records.recorded(folder, "evaluation", name, asked)


def lacks(study: str, config: RunConfig, corpus: Corpus, out: Path) -> tuple[str, ...]:
    """The missing records of a run: "training", "evaluation", both or none.

    A recorded training is missing too if the evaluation is missing and the trained model was deleted: it would run again.
    """
    training, evaluation = recorded(study, config, corpus, out)
    trains = training is None or not (evaluation or checkpoint_folder(out, study, config, corpus).is_dir())
    return (*(["training"] if trains else []), *([] if evaluation else ["evaluation"]))


def _curves(progress: checkpoint.Progress) -> dict[str, Mapping[str, Sequence[float]]]:
    return {"training": progress.curve} | ({"validation": progress.validation} if progress.validation["step"] else {})


def _train(
    title: str,
    config: RunConfig,
    corpus: Corpus,
    folder: Path,
    console: Console,
    tell: Callable[[checkpoint.Progress], None],
    place: Place,
) -> checkpoint.Progress:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:.3f} nats  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[all_models]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        name = f"{place.name}: {title}" if place.name else title
        task = bar.add_task(name, total=config.train.steps, loss=float("nan"), speed=0.0, all_models="")
        last = time.monotonic()
        first: checkpoint.Progress | None = None

        def show(progress: checkpoint.Progress) -> None:
            nonlocal last, first
            first = first or progress
            speed = _tokens_per_second(config, progress, since=first)
            left = (config.train.steps - progress.step) * config.train.batch_tokens / speed / 60
            in_all = f", {left + place.tokens_later / speed / 60:.0f} min for all models" if place.tokens_later else ""
            bar.update(
                task,
                completed=progress.step,
                loss=progress.loss_nats,
                speed=speed,
                all_models=in_all.removeprefix(", "),
            )
            late = time.monotonic() - last >= SECONDS_BETWEEN_LINES
            if not console.is_terminal and (late or progress.step == config.train.steps):
                last = time.monotonic()
                console.print(
                    f"{name}: step {progress.step:,} of {config.train.steps:,}, {progress.loss_nats:.3f} nats, "
                    f"{speed:,.0f} tokens/s, {left:.0f} min left{in_all}",
                    soft_wrap=True,
                )

        def show_and_tell(progress: checkpoint.Progress) -> None:
            show(progress)
            tell(progress)

        progress = train(config, corpus, folder, on_step=show_and_tell)
        if console.is_terminal:  # a training that was already finished has called no callback
            show(progress)
    return progress


def _tokens_per_second(
    config: RunConfig, progress: checkpoint.Progress, *, since: checkpoint.Progress | None = None
) -> float:
    """The speed over the steps after `since`, such as those after a resumption; over all steps if there are none."""
    start = since if since and since.step < progress.step else checkpoint.Progress()
    return (progress.step - start.step) * config.train.batch_tokens / (progress.seconds - start.seconds)


def _evaluate(
    name: str,
    config: RunConfig,
    corpus: Corpus,
    model: LanguageModel,
    asked: Mapping[str, Json],
    folder: Path,
    say: Callable[[str], None],
) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    curves = all_curves(
        model,
        test_text(config, corpus),
        config.eval,
        encode=lambda text: corpus.tokenizer.encode(text).tolist(),
        say=say,
    )
    tested = dataclasses.replace(corpus, valid=test_text(config, corpus))
    curves |= own_curves(type(model.position), model, tested, config.eval)
    record = records.make(
        "evaluation",
        name,
        config=asked,
        metrics={"parameters": model.num_parameters()},
        curves=curves,
        started=started,
    )
    path = records.save(record, folder)
    say(f"nats per token {_summary(curves['by_length'])}  ({record.seconds:.0f} s)")
    return path


def _say(console: Console, title: str, sentence: str) -> None:
    """Prints below the progress bar; without a terminal, adds the run's title, because several runs may share a log."""
    console.print(f"{'' if console.is_terminal else title + ':'}  {escape(sentence)}", soft_wrap=True)


@contextlib.contextmanager
def _tracked(tracker: str, name: str, config: RunConfig, out: Path) -> Iterator[Callable[[checkpoint.Progress], None]]:
    """Sends each point of the curves to TensorBoard or Weights & Biases, through accelerate."""
    cpu = not torch.accelerator.is_available()
    folder = out / "tensorboard" if tracker == "tensorboard" else out
    accelerator = Accelerator(
        mixed_precision=config.train.precision, cpu=cpu, log_with=tracker, project_dir=str(folder)
    )
    if tracker == "wandb":
        accelerator.init_trackers(
            "alibi-attn", config=to_json(config), init_kwargs={"wandb": {"name": name, "dir": str(out)}}
        )
    else:
        accelerator.init_trackers(name)

    def tell(progress: checkpoint.Progress) -> None:
        for curve, columns in _curves(progress).items():
            if columns["step"][-1:] == [progress.step]:
                points = {f"{curve}/{column}": values[-1] for column, values in columns.items() if column != "step"}
                accelerator.log(points, step=progress.step)

    try:
        yield tell
    finally:
        for started in accelerator.trackers:
            started.finish()


def _no_tracking(progress: checkpoint.Progress) -> None:
    pass


def _summary(by_length: Mapping[str, Sequence[Json]]) -> str:
    pairs = zip(by_length["length"], by_length["nonoverlapping_nats"], strict=True)
    return "  ".join(f"{length}: " + (f"{nats:.3f}" if isinstance(nats, float) else "–") for length, nats in pairs)
