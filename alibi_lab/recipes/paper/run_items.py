"""Run items of the paper: train, evaluate and measure what is missing, and record each item's answer.

Items of one study share trainings, so all their runs form one experiment; finished runs are skipped. An answer is a record of
kind "paper-item": the series of the figure or the rows of the table, with the paper's labels and the names of its source
records.
"""

import dataclasses
import datetime
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from rich.console import Console
from rich.markup import escape

from alibi_lab import records
from alibi_lab.lab import experiment
from alibi_lab.lab.config import RunConfig, Scale, Selection
from alibi_lab.lab.config_io import to_json
from alibi_lab.recipes.paper import measure_speed
from alibi_lab.recipes.paper.answers import Evidence, metric
from alibi_lab.recipes.paper.cells import Item, SelectedItem, by_study, select
from alibi_lab.recipes.paper.items import PAPER


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
            runs = dict.fromkeys(typing.get_args(Scale), distinct)
            recipe = dataclasses.replace(PAPER, name=study, scales=typing.get_args(Scale), runs=runs.__getitem__)
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


def _measured(runs: Sequence[RunConfig], folder: Path, scale: Scale, console: Console) -> Iterator[Path]:
    for config in runs:
        old = measure_speed.recorded(config, folder, scale=scale)
        path = old or measure_speed.record_speed(config, folder, scale=scale)
        record = records.load(path)
        rate = f"{metric(record, 'train_tokens_per_second'):,.0f} tokens/s in training"
        console.print(f"[bold]{escape(record.name)}[/] {'is recorded already' if old else rate}")
        yield path


def _answered(selected: SelectedItem, by_file: Mapping[str, records.Record], folder: Path, scale: Scale) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    recipe = selected.item.recipe
    evidence = Evidence(by_file, selected.runs)
    found = [by_file[name].config.get("corpus") for name in evidence.files]
    corpora = {str(corpus): corpus for corpus in found if corpus is not None}
    config: dict[str, records.Json] = {
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
