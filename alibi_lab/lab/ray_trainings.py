"""Runs the trainings of an experiment as tasks of a Ray cluster, one processor each, or one GPU each if the cluster has GPUs.

If a worker dies, Ray repeats its task, and the training resumes from its newest checkpoint. All machines share the output
folder, and the command's working directory has the same path on each.
"""

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from alibi_lab.lab.config import RunConfig
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.run import make_run, run_once
from alibi_lab.lab.training.interruption import deferred_interruption

RETRIES = 10  # of a training whose workers die
SECONDS_BETWEEN_LOOKS = 0.2  # how often to check for a signal
_corpus = functools.cache(load_corpus)  # of a worker


def run_all(study: str, trainings: Sequence[Sequence[RunConfig]], *, out: Path, console: Console, track: str) -> None:
    """Makes the records of all runs on the connected cluster.

    Args:
        trainings: one list of runs per training; runs of one list differ only in their test.
        out, console, track: as in `experiment.run`; the tokenized text must already be in `out`.

    Raises:
        KeyboardInterrupt: this process was interrupted; all trainings have stopped and saved checkpoints.
        ChildProcessError: the workers of a training died each time, or Ray cannot go on; all trainings have stopped.
        CheckpointError, TrainingError, EvaluationError, OSError: the first training that failed; the others have
            stopped.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_run_training)
    with deferred_interruption() as interrupted, tempfile.NamedTemporaryFile(dir=out, prefix=".shared-") as shared:
        place = Path.cwd(), out, Path(shared.name).name
        tasks = [task.remote(study, runs, *place, console.quiet, track) for runs in trainings]
        left = tasks
        try:
            while left:
                done, left = ray.wait(left, timeout=SECONDS_BETWEEN_LOOKS)
                if interrupted():
                    raise KeyboardInterrupt
                ray.get(done)
        except BaseException as error:
            for one in tasks:
                ray.cancel(one)  # interrupts the training, which saves a checkpoint
            ray.wait(tasks, num_returns=len(tasks))
            if isinstance(error, RayTaskError):
                raise error.cause from None
            if isinstance(error, RayError):
                raise ChildProcessError(
                    f"a training cannot go on ({str(error).strip().splitlines()[0]}); the same command resumes"
                ) from error
            raise


# The functions below run in the worker processes.


def _run_training(
    study: str, configs: Sequence[RunConfig], folder: Path, out: Path, shared: str, quiet: bool, track: str
) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)  # paths of texts and methods may be relative
    if not (out / shared).exists():
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see {out} of {folder}; run the command in a folder that all machines share"
        )
    torch.set_num_threads(1)
    console = Console(quiet=quiet, force_terminal=False, highlight=False, soft_wrap=True)
    for config in configs:
        run_once(make_run(study, config, _corpus(config.data, out / "tokens"), out), console, track)
