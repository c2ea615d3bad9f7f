"""One run of an experiment: trains and tests what has no record yet, and saves one record of each.

An interrupted training is resumed from its checkpoint; a finished one is only tested. `experiment.py` runs those of a recipe,
and `ray_trainings.py` runs several on a cluster.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path

from accelerate import PartialState
from rich.console import Console
from rich.markup import escape

from alibi_lab import records
from alibi_lab.lab.config import TASK_CORPUS, ConfigError, Method, RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.evaluation.evaluate import all_curves, own_curves, scored_stretches
from alibi_lab.lab.model.method_checks import source_facts
from alibi_lab.lab.progress import Place, progress_shown, tokens_per_second, tracked
from alibi_lab.lab.training.checkpoint import Progress, load_model
from alibi_lab.lab.training.flops import full_tokens_per_second, matrix_flops_per_second
from alibi_lab.lab.training.train import num_pieces, train
from alibi_lab.records import Json


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
    model = load_model(run.checkpoints, run.config)
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
    with (
        tracked(track, run.name, run.training, settings.precision, run.out) as log,
        progress_shown(console, run.title, settings.steps, settings.batch_tokens, place, full_speed) as show,
    ):

        def on_step(progress: Progress) -> None:
            nonlocal first
            first = first or progress
            show(progress)
            log(progress)

        progress = train(run.config, run.corpus, run.checkpoints, on_step=on_step)
        if console.is_terminal:  # a training that was already finished has called no callback
            show(progress)
    metrics = {
        "loss_nats": progress.loss_nats,
        "tokens": progress.step * settings.batch_tokens,
        "tokens_per_second": tokens_per_second(settings.batch_tokens, progress),
        "seconds": progress.seconds,
        "peak_memory_bytes": progress.peak_memory_bytes,
    }
    if rate and full_speed:
        speed = tokens_per_second(settings.batch_tokens, progress, since=first)
        metrics |= {"utilization": speed / full_speed, "matrix_flops_per_second": rate}
    return metrics, progress.curves()
