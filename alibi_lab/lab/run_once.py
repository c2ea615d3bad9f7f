"""Trains and tests one run, and saves one record of each unless it exists.

An interrupted training is resumed from its checkpoint; a finished one is only tested. `experiment.py` runs those of a recipe,
and `ray_trainings.py` runs several on a cluster.
"""

import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accelerate import PartialState
from rich.console import Console
from rich.markup import escape

from alibi_lab import records
from alibi_lab.lab.evaluation.long_context_eval import all_curves, own_curves
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.progress import Place, progress_shown, tokens_per_second
from alibi_lab.lab.run import Run
from alibi_lab.lab.tracker import tracked
from alibi_lab.lab.training.checkpoint import Progress, load_checkpoint
from alibi_lab.lab.training.train import train
from alibi_lab.records import Json


def run_once(run: Run, console: Console, track: str, place: Place | None = None) -> list[Path]:
    """The paths of the run's two records, which are made unless they exist; none in other processes than the first."""
    training, evaluation = run.recorded()
    if training and evaluation:
        console.print(f"[bold]{run.title}[/] is recorded already")
        return [training, evaluation]
    started = datetime.datetime.now(datetime.UTC)
    progress = _train(run, console, track, place or Place())
    if not PartialState().is_main_process:
        return []
    model, _ = load_checkpoint(run.checkpoints, method=run.config.model.method)
    training = training or _save_training(run, progress, model.num_parameters(), started)
    if not evaluation:
        with console.status(f"{run.title}: testing at {', '.join(map(str, run.config.eval.lengths))}"):
            say = functools.partial(_say, console, run.title)
            evaluation = _evaluate(run, model.to(PartialState().device), say)
    return [training, evaluation]


def _train(run: Run, console: Console, track: str, place: Place) -> Progress:
    with (
        tracked(track, run.name, run.config, run.out) as tell,
        progress_shown(console, run.title, run.config.train, place) as show,
    ):

        def on_step(progress: Progress) -> None:
            show(progress)
            tell(progress)

        progress = train(run.config, run.corpus, run.checkpoints, on_step=on_step)
        if console.is_terminal:  # a training that was already finished has called no callback
            show(progress)
    return progress


def _save_training(run: Run, progress: Progress, parameters: int, started: datetime.datetime) -> Path:
    metrics: dict[str, float | None] = {
        "loss_nats": progress.loss_nats,
        "tokens": progress.step * run.config.train.batch_tokens,
        "tokens_per_second": tokens_per_second(run.config.train, progress),
        "seconds": progress.seconds,
        "peak_memory_bytes": progress.peak_memory_bytes,
        "parameters": parameters,
    }
    curves = progress.curves()
    record = records.make("training", run.name, config=run.training, metrics=metrics, curves=curves, started=started)
    return records.save(record, run.out / "records")


def _evaluate(run: Run, model: LanguageModel, say: Callable[[str], None]) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    corpus, config = run.corpus.to_test_on(run.config.eval.split), run.config.eval
    curves = all_curves(
        model, corpus.valid, config, encode=lambda text: corpus.tokenizer.encode(text).tolist(), say=say
    )
    curves |= own_curves(type(model.position), model, corpus, config)
    metrics = {"parameters": model.num_parameters()}
    record = records.make(
        "evaluation", run.name, config=run.evaluation, metrics=metrics, curves=curves, started=started
    )
    path = records.save(record, run.out / "records")
    say(f"nats per token {_summary(curves['by_length'])}  ({record.seconds:.0f} s)")
    return path


def _say(console: Console, title: str, sentence: str) -> None:
    """Prints below the progress bar; without a terminal, adds the run's title, because several runs may share a log."""
    console.print(f"{'' if console.is_terminal else title + ':'}  {escape(sentence)}", soft_wrap=True)


def _summary(by_length: Mapping[str, Sequence[Json]]) -> str:
    pairs = zip(by_length["length"], by_length["nonoverlapping_nats"], strict=True)
    return "  ".join(f"{length}: " + (f"{nats:.3f}" if isinstance(nats, float) else "–") for length, nats in pairs)
