"""Run a recipe: train what is not trained, evaluate what is not evaluated, and write a record of each.

    <out>/records/*.json                          one per training and one per evaluation
    <out>/checkpoints/<name>-<identity>/step-…/   see `checkpoint.py`

What is recorded already is skipped and what was cut is resumed, so that running a recipe again is always right.
"""

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alibi_attn import records
from alibi_attn.lab import checkpoint
from alibi_attn.lab.config import ConfigError, DataConfig, Recipe, RunConfig, Scale
from alibi_attn.lab.data import Corpus, load_corpus, num_pieces
from alibi_attn.lab.evaluate import Column, evaluate, scored_stretches
from alibi_attn.lab.fields import override, to_json
from alibi_attn.lab.train import train
from alibi_attn.records import Json


class ExperimentError(ValueError):
    """A folder that cannot be written, or in which another experiment runs."""


def run(
    recipe: Recipe,
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    console: Console | None = None,
) -> list[Path]:
    """Every run of the recipe, trained, evaluated and recorded; the records' paths, two per run.

    Args:
        out: folder for records and checkpoints; a second experiment in it is refused while the first one runs.
        overrides: fields to change in every run, by name: {"train.steps": "50"}.
        seeds: repeat every run with these seeds, instead of the one that the recipe says.
        console: where progress is shown; None shows nothing.

    Raises:
        ExperimentError: `out` cannot be written, or another experiment runs in it.
        ConfigError, CorpusError, CheckpointError, TrainingError: see there.
    """
    console = console or Console(quiet=True)
    configs = _configs(recipe, scale, overrides or {}, seeds)
    state = PartialState(cpu=not torch.accelerator.is_available())  # without it torchrun on CPUs is not seen
    if not state.is_main_process:
        console = Console(quiet=True)
    corpora: dict[DataConfig, Corpus] = {}
    for config in configs:  # all that can be wrong with the text is said before anything is trained or written
        if config.data not in corpora:
            corpora[config.data] = load_corpus(config.data)
        num_pieces(corpora[config.data].train, config.train.length)
        scored_stretches(len(corpora[config.data].valid), config.eval)
    paths: list[Path] = []
    with _alone_in(out) if state.is_main_process else contextlib.nullcontext():
        for config in configs:
            paths += _run_one(recipe.name, config, corpora[config.data], out, console)
    return paths


def run_name(recipe_name: str, config: RunConfig) -> str:
    """The name of a run's records.

    >>> run_name("quick", RunConfig())
    'quick/alibi-128/seed-0'
    """
    return f"{recipe_name}/{config.model.method}-{config.train.length}/seed-{config.train.seed}"


def _configs(recipe: Recipe, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int]) -> list[RunConfig]:
    configs = [override(config, overrides) for config in recipe.runs(scale)]
    if seeds:
        configs = [override(config, {"train.seed": str(seed)}) for seed in seeds for config in configs]
    if len({config.train.precision for config in configs}) > 1:
        raise ConfigError("the runs of one experiment must share train.precision; run them as separate experiments")
    return list(dict.fromkeys(configs))


def _run_one(recipe_name: str, config: RunConfig, corpus: Corpus, out: Path, console: Console) -> list[Path]:
    name, folder = run_name(recipe_name, config), out / "records"
    asked = {**to_json(config), "corpus": corpus.facts}
    trained = {key: value for key, value in asked.items() if key != "eval"}
    training = _recorded(folder, "training", name, trained)
    evaluation = _recorded(folder, "evaluation", name, asked)
    if training and evaluation:
        console.print(f"[bold]{escape(name)}[/] is recorded already")
        return [training, evaluation]
    checkpoints = out / "checkpoints" / f"{name}-{records.identity('training', name, trained)}"
    started = datetime.datetime.now(datetime.UTC)
    progress = _train(name, config, corpus, checkpoints, console)
    if not PartialState().is_main_process:
        return []
    if not training:
        metrics: dict[str, float | None] = {
            "loss_nats": progress.loss_nats,
            "tokens": progress.step * config.train.batch_tokens,
            "tokens_per_second": progress.step * config.train.batch_tokens / progress.seconds,
            "seconds": progress.seconds,
            "peak_memory_bytes": progress.peak_memory_bytes,
            "parameters": _parameters(checkpoints),
        }
        training = records.save(
            records.make(
                "training", name, config=trained, metrics=metrics, curves={"training": progress.curve}, started=started
            ),
            folder,
        )
    if not evaluation:
        evaluation = _evaluate(name, config, corpus, checkpoints, asked, folder, console)
    return [training, evaluation]


def _train(name: str, config: RunConfig, corpus: Corpus, folder: Path, console: Console) -> checkpoint.Progress:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:.3f} nats  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(escape(name), total=config.train.steps, loss=float("nan"), speed=0.0)

        def show(progress: checkpoint.Progress) -> None:
            speed = progress.step * config.train.batch_tokens / progress.seconds
            bar.update(task, completed=progress.step, loss=progress.loss_nats, speed=speed)

        progress = train(config, corpus, folder, on_step=show)
        show(progress)
    return progress


def _evaluate(
    name: str,
    config: RunConfig,
    corpus: Corpus,
    checkpoints: Path,
    asked: Mapping[str, Json],
    folder: Path,
    console: Console,
) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    model = checkpoint.load_checkpoint(checkpoints)[0].to(PartialState().device)
    with console.status(f"{escape(name)}: testing at {', '.join(map(str, config.eval.lengths))}"):
        curves = evaluate(model, corpus.valid, config.eval)
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


def _summary(by_length: Mapping[str, Column]) -> str:
    pairs = zip(by_length["length"], by_length["nonoverlapping_nats"], strict=True)
    return "  ".join(f"{length}: " + ("–" if nats is None else f"{nats:.3f}") for length, nats in pairs)


def _parameters(checkpoints: Path) -> int:
    return checkpoint.load_checkpoint(checkpoints)[0].num_parameters()


def _recorded(folder: Path, kind: str, name: str, config: Mapping[str, Json]) -> Path | None:
    return next(folder.glob(f"*-{records.identity(kind, name, config)}.json"), None)


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    lock = FileLock(out / ".lock", timeout=0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ExperimentError(f"another experiment is running in {out}; wait for it, or pass another folder") from None
    except OSError as error:
        raise ExperimentError(f"{out} cannot be written ({error.strerror}); pass a folder that you may write") from None
    try:
        yield
    finally:
        lock.release()
