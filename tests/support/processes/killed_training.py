"""Kills a training with SIGKILL repeatedly, each time at another point, until it completes.

Run as a program: killed_training.py FOLDER CONFIG.json. Processes are forked after torch is loaded, so that restarts
are cheap.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 - which every optimizer loads
from kills import end_of

from alibi_attn import files
from alibi_lab.lab import sealed_folder
from alibi_lab.lab.config_io import from_json
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.training import checkpoint
from alibi_lab.lab.training.checkpoint import load_checkpoint, newest
from alibi_lab.lab.training.train import train

# While a checkpoint is written, the process dies just before or just after the given call of each function.
POINTS = [
    (module, name, call, after)
    for module, name, call in (
        (checkpoint, "save_state", 2),
        (checkpoint, "save_file", 1),
        (sealed_folder, "_entry", 2),
        (files, "_flush", 2),  # the new folder, under its temporary name
        (files, "_flush", 8),  # the run's folder, after the new one was renamed
        (os, "rename", 1),
        (checkpoint.shutil, "rmtree", 2),  # an older step, after the new one is complete
        (checkpoint.torch, "save", 3),
    )
    for after in (False, True)
]


def main() -> None:
    folder, config = Path(sys.argv[1]), from_json(json.loads(Path(sys.argv[2]).read_text()))
    corpus = load_corpus(config.data)
    assert end_of(lambda: train(config, corpus, folder / "uncut")) == 0
    ends, steps = [], []

    def note(delay: float | None = None) -> None:
        found = newest(folder / "cut")
        steps.append(0 if found is None else int(found.name.removeprefix("step-")))
        if found is not None:
            load_checkpoint(found)  # complete, no matter when the process died

    for point in POINTS:
        ends.append(end_of(lambda point=point: (arm(*point), train(config, corpus, folder / "cut"))))
        note()
    generator = random.Random(0)
    while ends[-1] != 0:
        seconds = generator.uniform(0.0, 0.12)
        ends.append(end_of(lambda: train(config, corpus, folder / "cut"), seconds=seconds if len(ends) < 30 else None))
        note()
    print(json.dumps({"ends": ends, "steps": steps}))


def arm(module, name: str, call: int, after: bool) -> None:
    real, calls = getattr(module, name), 0

    def deadly(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


if __name__ == "__main__":
    main()
