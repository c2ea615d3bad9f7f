"""Runs several trainings of an experiment at the same time on one machine, one process per training.

For processors with many cores, which one small model does not use fully; on two cores there is no gain (`docs/log.md`).
Each process takes the next training that has not begun, with an equal share of the threads. Interrupting them works as
for one training: each finishes its step and saves a checkpoint.
"""

import concurrent.futures
import concurrent.futures.process
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console

from alibi_attn.lab.config import DataConfig, RunConfig
from alibi_attn.lab.data.corpus import Corpus, load_corpus
from alibi_attn.lab.run import run_once
from alibi_attn.lab.training.interruption import deferred_interruption

SECONDS_BETWEEN_LOOKS = 0.2  # how often to check for a signal
DIED = "a training's process died, most likely because memory ran out; pass fewer jobs, and the same command goes on"
_Work: TypeAlias = "concurrent.futures.Future[None]"


def run_at_once(
    study: str, trainings: Sequence[Sequence[RunConfig]], jobs: int, *, out: Path, console: Console, track: str
) -> None:
    """Make the records of all runs, `jobs` trainings at a time.

    Args:
        trainings: one list of runs per training; runs of one list differ only in their test.
        out, console, track: as in `experiment.run`; the tokenized text must already be in `out`.

    Raises:
        KeyboardInterrupt: this process was interrupted; all trainings have stopped and saved checkpoints.
        ChildProcessError: a worker process died or was stopped; all trainings have stopped.
        CheckpointError, TrainingError, EvaluationError, OSError: the first training that failed; the others have
            stopped.
    """
    workers = min(jobs, len(trainings))
    threads = max(1, torch.get_num_threads() // workers)
    context = multiprocessing.get_context("spawn")
    with (
        deferred_interruption() as interrupted,
        concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(threads,)
        ) as pool,
    ):
        work = functools.partial(_run_training, study, out=out, quiet=console.quiet, track=track)
        asked = [pool.submit(work, runs) for runs in trainings]
        pool.submit(int)  # wakes the pool's manager, which otherwise does not watch a process started while it slept
        try:
            _wait(asked, interrupted)
        except BaseException as error:
            for child in multiprocessing.active_children():
                child.terminate()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, concurrent.futures.process.BrokenProcessPool):
                raise ChildProcessError(DIED) from None
            if isinstance(error, OSError) or type(error).__module__.startswith("alibi_attn."):
                raise error.with_traceback(None) from error.__cause__  # the traceback of the worker is in its cause
            raise


def _wait(asked: Sequence[_Work], interrupted: Callable[[], bool]) -> None:
    left: set[_Work] = set(asked)
    while left:
        done, left = concurrent.futures.wait(left, SECONDS_BETWEEN_LOOKS, concurrent.futures.FIRST_COMPLETED)
        if interrupted():
            raise KeyboardInterrupt
        for future in done:
            future.result()


# The functions below run in the worker processes.


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one stops the others
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # saves a checkpoint as usual

    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_training(study: str, runs: Sequence[RunConfig], *, out: Path, quiet: bool, track: str) -> None:
    console = Console(quiet=quiet, force_terminal=False, highlight=False, soft_wrap=True)
    try:
        for run in runs:
            run_once(study, run, _corpus(run.data, out), out, console, track)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # a raised error would be sent back, and the process would take more work


@functools.cache
def _corpus(data: DataConfig, out: Path) -> Corpus:
    return load_corpus(data, out / "tokens")
