"""Two processes, as torchrun starts them: two_processes.py FOLDER CONFIG.json. The first one prints JSON.

DDP runs a whole experiment; FSDP trains uninterrupted, then interrupted by a signal to one process only, and resumed.
"""

import dataclasses
import json
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer loads
from accelerate import PartialState
from forked_ranks import exit_codes
from small_runs import recipe_of
from torch.distributed.tensor import DTensor

from alibi_lab.lab.config_io import from_json
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.experiment import run
from alibi_lab.lab.training import train as loop
from alibi_lab.lab.training.train import train


def work(rank: int) -> None:
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), from_json(json.loads(Path(sys.argv[2]).read_text()))
    run(recipe_of(config, name="two"), out=folder / "ddp")
    told: dict[str, object] = {"world_size": torch.distributed.get_world_size()}
    first = PartialState().is_main_process
    assert first == (rank == 0)

    seen = {}
    real = loop.prepare

    def prepare(asked):
        training = real(asked)
        seen["parameters"] = [type(parameter) is DTensor for parameter in training.model.parameters()]
        local = sum(parameter.to_local().numel() for parameter in training.model.parameters())
        seen["share"] = local / training.model.num_parameters()
        return training

    loop.prepare = prepare
    corpus = load_corpus(config.data)
    sharded = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp"))
    train(sharded, corpus, folder / "uncut")
    told |= seen

    def interrupt(progress):
        if progress.step == 4 and not first:
            signal.raise_signal(signal.SIGINT)

    try:
        train(sharded, corpus, folder / "cut", on_step=interrupt)
    except KeyboardInterrupt:
        told["state"] = sorted(path.name for path in (folder / "cut").glob("step-00000005/state/*"))
    train(sharded, corpus, folder / "cut")
    if first:
        print(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(max(map(abs, exit_codes(work))))
