"""Run items of the paper: train, evaluate and measure what is missing, and record each item's answer.

Items of one study share trainings, so all their runs form one experiment; finished runs are skipped. An answer is a record of
kind "paper-item": the series of the figure or the rows of the table, with the paper's labels and the names of its source
records.

The study "speed" (figures 2 and 7, table 1) trains nothing: it measures training steps and one evaluation. Each measurement
runs in a separate process, because a process's peak memory includes everything it ran before. Speed does not depend on the
text, so the tokens are random.
"""

import dataclasses
import datetime
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch
from rich.console import Console
from rich.markup import escape

from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab import records
from alibi_lab.lab import experiment
from alibi_lab.lab.config import RunConfig, Scale, Selection
from alibi_lab.lab.config_io import from_json, to_json
from alibi_lab.lab.data.corpus import random_corpus
from alibi_lab.lab.evaluation.evaluate import evaluate
from alibi_lab.lab.training.checkpoint import load_checkpoint
from alibi_lab.lab.training.train import train
from alibi_lab.measure.timing import in_fresh_process
from alibi_lab.recipes.paper.answers import Evidence, metric
from alibi_lab.recipes.paper.cells import Item, SelectedItem, by_study, select
from alibi_lab.recipes.paper.items import PAPER
from alibi_lab.recipes.paper.studies import WARM_STEPS
from alibi_lab.records import Json


def run_items(
    items: Sequence[Item],
    *,
    out: Path,
    shard: tuple[int, int] = (0, 1),
    on_ray: bool = False,
    console: Console | None = None,
    track: str = "",
    **selection: Unpack[Selection],
) -> list[Path]:
    """Train, evaluate and record what the items need, then record their answers; the paths of all these records.

    Args:
        items: the figures and tables to answer.
        out, console, track: as for `experiment.run`.
        selection: as for `experiment.run`; of methods to compare instead of the paper's, "alibi" must be one.
        shard: as for `experiment.run`. A shard measures no speed and records no answers; once all shards have run, the same
            call without a shard does both.
        on_ray: as for `experiment.run`; speed is always measured in this process.

    With several processes, the first one evaluates and answers; the others only train and return an empty list.

    Raises:
        ConfigError: an override of a field that an item varies, or methods that an item cannot compare.
        ExperimentError, CorpusError, CheckpointError, TrainingError: see `experiment.run`.
    """
    console, scale = console or Console(quiet=True), selection.get("scale", "small")
    processes = experiment.processes()
    selected = [select(item, **selection) for item in items]
    if processes.num_processes > 1 and any(one.item.recipe.study == "speed" and one.runs for one in selected):
        raise experiment.ExperimentError(
            "figure-2, figure-7 and table-1 measure the speed of one process; run them, or paper, without the launcher"
        )
    paths: list[Path] = []
    for study, distinct in by_study(selected, shard).items():
        if study == "speed":
            paths += _measured(distinct, out / "records", scale, console)
        elif distinct:
            recipe = dataclasses.replace(PAPER, name=study, scales=(scale,), runs={scale: distinct}.__getitem__)
            paths += experiment.run(
                recipe, out=out, scale=scale, shard=shard, on_ray=on_ray, console=console, track=track
            )
    if not processes.is_main_process:
        return []
    paths = list(dict.fromkeys(paths))
    if shard[1] > 1:
        return paths
    by_file = {f"{records.key(one)}.json": one for one in map(records.load, paths)}
    return paths + [_answered(one, by_file, out / "records", scale) for one in selected]


def recorded_speed(config: RunConfig, folder: Path, *, scale: Scale) -> Path | None:
    """The record of a measurement of speed; None if there is none."""
    return records.recorded(folder, "speed", *_identity(config, scale))


def _identity(config: RunConfig, scale: Scale) -> tuple[str, dict[str, Json]]:
    """The name and the config of the record."""
    name = f"speed/{config.model.method}-{config.train.length}/seed-{config.train.seed}"
    return name, {**to_json(config), "process": "shared" if scale == "smoke" else "its own"}


def _measured(runs: Sequence[RunConfig], folder: Path, scale: Scale, console: Console) -> Iterator[Path]:
    """The records of the speeds, which are made unless they exist; at smoke scale they are measured in this process."""
    for config in runs:
        name, config_json = _identity(config, scale)
        path, shown = recorded_speed(config, folder, scale=scale), "is recorded already"
        if path is None:
            started = datetime.datetime.now(datetime.UTC)
            metrics = measure(to_json(config)) if scale == "smoke" else in_fresh_process(measure, to_json(config))
            record = records.make("speed", name, config=config_json, metrics=metrics, started=started)
            path = records.save(record, folder)
            shown = f"{metric(record, 'train_tokens_per_second'):,.0f} tokens/s in training"
        console.print(f"[bold]{escape(name)}[/] {shown}")
        yield path


def measure(config_json: Mapping[str, Json]) -> dict[str, float | None]:
    """Tokens per second in training (median over steps) and in evaluation, and the peak memory of the training."""
    config = from_json(config_json)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    count = 2 * max(config.train.batch_tokens, config.eval.tokens) + 2 * config.train.length
    corpus = random_corpus(min(config.model.vocab_size, 256), count)
    idle = peak_memory_bytes(device) if reset_peak_memory(device) else None
    ends: list[float] = []  # in seconds of training
    with tempfile.TemporaryDirectory() as folder:
        peak = train(config, corpus, Path(folder), on_step=lambda now: ends.append(now.seconds)).peak_memory_bytes
        model = load_checkpoint(Path(folder), method=config.model.method)[0].to(device)
    steps = [after - before for before, after in itertools.pairwise(ends[WARM_STEPS - 1 :])]
    return {
        "train_tokens_per_second": config.train.batch_tokens / statistics.median(steps),
        "evaluation_tokens_per_second": evaluate(model, corpus.valid, config.eval)["by_length"]["tokens_per_second"][0],
        "memory_bytes": peak,
        "memory_above_idle_bytes": None if peak is None or idle is None else peak - idle,
    }


def _answered(selected: SelectedItem, by_file: Mapping[str, records.Record], folder: Path, scale: Scale) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    recipe = selected.item.recipe
    evidence = Evidence(by_file, selected.runs)
    found = [by_file[name].config.get("corpus") for name in evidence.files]
    corpora = {str(corpus): corpus for corpus in found if corpus is not None}
    config: dict[str, Json] = {
        "scale": scale,
        "study": recipe.study,
        "corpora": list(corpora.values()),
        "models": [to_json(run)["model"] for run in selected.runs[:1]],
        "evidence": list(evidence.files),
    }
    old = records.recorded(folder, "paper-item", recipe.name, config)
    if old:
        return old
    curves = selected.item.answer(selected.cells, evidence)
    record = records.make("paper-item", recipe.name, config=config, metrics={}, curves=curves, started=started)
    return records.save(record, folder)
