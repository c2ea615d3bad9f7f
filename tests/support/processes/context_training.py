"""Trains on sequences shared by two processes: uninterrupted, then with one of them killed, then resumed.

Run as a program: context_training.py FOLDER CONFIG.json; it prints JSON. Processes are forks of one that has loaded torch.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer loads
from forked_ranks import exit_codes

from alibi_lab.lab.config import RunConfig
from alibi_lab.lab.config_io import from_json
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.training.checkpoint import Progress, load_progress, newest
from alibi_lab.lab.training.train import train

TRAINED = ("alibi", "alibi-fox", "rotary")
DIES_AFTER = 5


def curves(progress: Progress) -> list[list[float]]:
    """Losses of training and validation."""
    return [progress.curve["loss_nats"], progress.validation["nats"]]


def together(config: RunConfig, folder: Path, *, killed: bool = False) -> tuple[list[int], float]:
    """Returns the exit codes of two processes that train together, and the seconds that they took."""
    start = time.monotonic()
    return exit_codes(work, config, folder, killed), time.monotonic() - start


def work(rank: int, config: RunConfig, folder: Path, killed: bool) -> None:
    torch.set_num_threads(1)

    def on_step(progress) -> None:
        if killed and rank == 1 and progress.step == DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(config, load_corpus(config.data), folder, on_step=on_step)
    except RuntimeError as error:
        (folder / f"told-{rank}.txt").write_text(str(error))
        os._exit(3)


def main() -> None:
    folder, config = Path(sys.argv[1]), from_json(json.loads(Path(sys.argv[2]).read_text()))
    torch.set_num_threads(1)
    told: dict[str, object] = {}
    configs = {
        name: dataclasses.replace(config, model=dataclasses.replace(config.model, method=name)) for name in TRAINED
    }
    configs["fsdp"] = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp"))
    for name, shared in configs.items():
        told[f"{name} codes"], _ = together(shared, folder / name)
        told[name] = curves(load_progress(newest(folder / name), shared))
    (folder / "cut").mkdir()
    told["killed"], told["killed_s"] = together(config, folder / "cut", killed=True)
    told["told"] = (folder / "cut" / "told-0.txt").read_text()
    told["step"] = int(newest(folder / "cut").name.removeprefix("step-"))
    told["resumed"], _ = together(config, folder / "cut")
    told["cut"] = curves(load_progress(newest(folder / "cut"), config))
    # Last, because forks would inherit this process's single-process state.
    for name, shared in configs.items():
        alone = dataclasses.replace(shared, train=dataclasses.replace(shared.train, context_parallel=1))
        told[f"{name} alone"] = curves(train(alone, load_corpus(config.data), folder / f"{name}-alone"))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
