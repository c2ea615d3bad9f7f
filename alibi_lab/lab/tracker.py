"""Sends the losses of a training to TensorBoard or Weights & Biases, through accelerate."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator

from alibi_lab.lab.training.checkpoint import Progress
from alibi_lab.records import Json


@contextlib.contextmanager
def tracked(
    tracker: str, name: str, config: Mapping[str, Json], precision: str, out: Path
) -> Iterator[Callable[[Progress], None]]:
    """Sends each point of the curves of a progress that is passed to the returned function; no tracker, "", sends none."""
    if not tracker:
        yield lambda progress: None
        return
    cpu = not torch.accelerator.is_available()
    folder = out / "tensorboard" if tracker == "tensorboard" else out
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, log_with=tracker, project_dir=str(folder))
    if tracker == "wandb":
        accelerator.init_trackers(
            "alibi-attn", config=dict(config), init_kwargs={"wandb": {"name": name, "dir": str(out)}}
        )
    else:
        accelerator.init_trackers(name)

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
