"""The progress of a training: a bar in a terminal, a line from time to time elsewhere, with the time that is left.

Trackers, TensorBoard or Weights & Biases, get its losses through accelerate.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from alibi_lab.lab.training.checkpoint import Progress
from alibi_lab.records import Json

Place: TypeAlias = tuple[str, int]

SECONDS_BETWEEN_LINES = 30  # if there is no terminal for a bar
WIDE = 140  # columns of a terminal with room for everything
_BEFORE_NAME = 47  # columns: "100,000/100,000", the bar, the time, "10.000 nats"


@contextlib.contextmanager
def progress_shown(
    console: Console, title: str, steps: int, batch_tokens: int, place: Place, full_speed: float | None = None
) -> Iterator[Callable[[Progress], None]]:
    """Shows each progress that is passed to the returned function.

    Args:
        place: of the run in its experiment: "model 1 of 4" or "", and the number of tokens in later trainings.
        full_speed: tokens per second at a utilization (MFU) of 1; None if unknown.
    """
    number, tokens_later = place
    name = f"{number}: {title}" if number else title
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
        task = bar.add_task(name if is_wide else shortened(name, room), total=steps, loss="", speed="")
        last = time.monotonic()
        first: Progress | None = None

        def show(progress: Progress) -> None:
            nonlocal last, first
            first = first or progress
            speed = tokens_per_second(batch_tokens, progress, since=first)
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
def tracked(
    tracker: str, name: str, config: Mapping[str, Json], precision: str, out: Path
) -> Iterator[Callable[[Progress], None]]:
    """Sends each point of the curves of a progress that is passed to the returned function; no tracker, "", sends none."""
    if not tracker:
        yield lambda progress: None
        return
    wandb, cpu = tracker == "wandb", not torch.accelerator.is_available()
    folder = str(out if wandb else out / "tensorboard")
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, log_with=tracker, project_dir=folder)
    options = {"wandb": {"name": name, "dir": folder}}
    accelerator.init_trackers("alibi-attn" if wandb else name, dict(config) if wandb else None, options)

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


def tokens_per_second(batch_tokens: int, progress: Progress, *, since: Progress | None = None) -> float:
    """The speed over the steps after `since`, such as those after a resumption; over all steps if there are none."""
    start = since if since and since.step < progress.step else Progress()
    return (progress.step - start.step) * batch_tokens / (progress.seconds - start.seconds)


def shortened(name: str, room: int) -> str:
    """The name in at most `room` characters, with its end, which tells runs apart."""
    return name if len(name) <= room else "…" + name[len(name) + 1 - max(room, 9) :]
