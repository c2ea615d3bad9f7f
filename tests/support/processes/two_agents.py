"""Two torchrun agents with one process each, as on two machines, that train a small model with FSDP."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from small_runs import smoke_run

from alibi_lab.lab.training.checkpoint import newest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
TRAIN = {"parallel": "fsdp", "steps": "100", "checkpoint_every": "10", "log_every": "1"}


class Agents:
    """The agents, by rank, and the newest checkpoints that were seen.

    Args:
        out: the folder that both machines share.
        options: torchrun's options for each rank.
        environment: variables added to this process's.
    """

    def __init__(self, out: Path, options: Sequence[Sequence[str]], **environment: str) -> None:
        run = smoke_run(out, {f"train.{name}": value for name, value in TRAIN.items()})
        self.out, self.steps = out, [0]
        self.commands = [[*TORCHRUN, *some, "-m", "alibi_lab", *run] for some in options]
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", **environment}
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Agents":
        for rank in (0, 1):
            self.start(rank)
        return self

    def __exit__(self, *error: object) -> None:
        for rank, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(rank)

    def start(self, rank: int) -> None:
        with (self.out.parent / f"agent-{rank}.txt").open("ab") as said:
            self.agents[rank] = subprocess.Popen(self.commands[rank], stdout=said, stderr=said, env=self.environment)

    def worker(self, rank: int) -> psutil.Process:
        children = psutil.Process(self.agents[rank].pid).children(recursive=True)
        (found,) = [child for child in children if "alibi_lab" in child.cmdline()]
        return found

    def kill(self, rank: int) -> None:
        """The end of a machine: SIGKILL to the agent and its children."""
        children = psutil.Process(self.agents[rank].pid).children(recursive=True)
        self.agents[rank].kill()
        for child in children:
            child.kill()
        self.agents[rank].wait()

    def until_checkpoint(self) -> None:
        while self.steps[-1] == 0:
            assert [agent.poll() for agent in self.agents.values()] == [None, None], self.said()
            self._watch()

    def ends(self, *ranks: int) -> list[int]:
        """The exit codes, after waiting."""
        while any(self.agents[rank].poll() is None for rank in ranks):
            self._watch()
        return [self.agents[rank].wait() for rank in ranks]

    def said(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted(self.out.parent.glob("agent-*.txt")))

    def _watch(self) -> None:
        time.sleep(0.02)
        for folder in self.out.glob("checkpoints/quick/*/seed-0-*"):
            found = newest(folder)
            if found and int(found.name.removeprefix("step-")) != self.steps[-1]:
                self.steps.append(int(found.name.removeprefix("step-")))
