"""Run items of the paper: train, evaluate and measure what is missing, and record each item's answer.

Items of one study share trainings, so all their runs form one experiment; finished runs are skipped. An answer is a record of
kind "paper-item": the series of the figure or the rows of the table, with the paper's labels and the names of its source
records.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from alibi_attn import records
from alibi_attn.lab import experiment
from alibi_attn.lab.config import Recipe, RunConfig, Scale
from alibi_attn.lab.config_io import to_json
from alibi_attn.recipes.paper import measure_speed
from alibi_attn.recipes.paper.cells import Asked, Item, ask
from alibi_attn.recipes.paper.evidence import Evidence, metric


def run_items(
    items: Sequence[Item],
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    shard: tuple[int, int] = (0, 1),
    jobs: int = 1,
    console: Console | None = None,
    track: bool = False,
) -> list[Path]:
    """Train, evaluate and record what the items need, then record their answers; the paths of all these records.

    Args:
        items: the figures and tables to answer.
        out, scale, overrides, seeds, console, track: as for `experiment.run`.
        shard: as for `experiment.run`. A shard measures no speed and records no answers; once all shards have run, the same
            call without a shard does both.
        jobs: trainings at the same time, as for `experiment.run`; speed is always measured one run at a time.

    With several processes, the first one evaluates and answers; the others only train and return an empty list.

    Raises:
        ConfigError: an override of a field that an item varies.
        ExperimentError, CorpusError, CheckpointError, TrainingError: see `experiment.run`.
    """
    console = console or Console(quiet=True)
    processes = experiment.processes()
    asked = [ask(item, scale, overrides or {}, seeds) for item in items]
    if processes.num_processes > 1 and any(one.item.recipe.study == "speed" and one.runs for one in asked):
        raise experiment.ExperimentError(
            "figure-2, figure-7 and table-1 measure the speed of one process; run them, or paper, without the launcher"
        )
    by_study: dict[str, list[RunConfig]] = {}
    for one in asked:
        by_study.setdefault(one.item.recipe.study, []).extend(one.runs)
    paths: list[Path] = []
    for study, runs in by_study.items():
        distinct = tuple(dict.fromkeys(runs))
        if study == "speed" and shard[1] > 1:
            continue
        if study == "speed":
            paths += _measured(distinct, out / "records", scale, console)
        elif distinct:
            paths += experiment.run(
                _study(study, distinct), out=out, scale=scale, shard=shard, jobs=jobs, console=console, track=track
            )
    if not processes.is_main_process:
        return []
    if shard[1] > 1:
        return list(dict.fromkeys(paths))
    by_file = {path.name: records.load(path) for path in dict.fromkeys(paths)}
    answers = [_answered(one, by_file, out / "records", scale) for one in asked]
    return [*dict.fromkeys(paths), *answers]


def _study(study: str, runs: tuple[RunConfig, ...]) -> Recipe:
    return Recipe(
        name=study,
        question="What do this study's figures and tables need?",
        paper=study,
        command="alibi run paper",
        cost="",
        expected="",
        runs=lambda scale: runs,
        study=study,
    )


def _measured(runs: Sequence[RunConfig], folder: Path, scale: Scale, console: Console) -> list[Path]:
    paths = []
    for config in runs:
        path, old = measure_speed.record_speed(config, folder, scale=scale)
        record = records.load(path)
        rate = metric(record, "train_tokens_per_second")
        status = "is recorded already" if old else f"{rate:,.0f} tokens/s in training"
        console.print(f"[bold]{escape(record.name)}[/] {status}")
        paths.append(path)
    return paths


def _answered(asked: Asked, by_file: Mapping[str, records.Record], folder: Path, scale: Scale) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    recipe = asked.item.recipe
    evidence = Evidence(by_file, asked.runs)
    corpora = {str(by_file[name].config.get("corpus")): by_file[name].config.get("corpus") for name in evidence.files}
    config: dict[str, records.Json] = {
        "scale": scale,
        "study": recipe.study,
        "corpora": [corpus for corpus in corpora.values() if corpus is not None],
        "models": [to_json(run)["model"] for run in asked.runs[:1]],
        "evidence": list(evidence.files),
    }
    old = records.recorded(folder, "paper-item", recipe.name, config)
    if old:
        return old
    curves = asked.item.answer(asked.cells, evidence)
    return records.save(
        records.make("paper-item", recipe.name, config=config, metrics={}, curves=curves, started=started), folder
    )
