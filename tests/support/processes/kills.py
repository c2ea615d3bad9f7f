"""Kills processes, at random moments too, without starting Python each time."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SERVER = """
import os, sys
from pathlib import Path
import torch
from alibi_attn import KVCache
torch.set_num_threads(1)
path = Path(sys.argv[1])
{work}
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def killed_at_random(work: str, path: Path, *, kills: int, longest: float) -> Iterator[int]:
    """Runs a function in a child process and kills it; yields the number of kills so far after each.

    Args:
        work: source that defines `work()`; it may use `path`, `torch`, `Path` and `KVCache`.
        kills: number of kills.
        longest: the most seconds that a child runs.
    """
    moments = random.Random(kills)
    command = [sys.executable, "-c", _SERVER.format(work=textwrap.dedent(work)), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        for count in range(1, kills + 1):
            server.stdin.write("start\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            time.sleep(moments.uniform(0.0, longest))
            os.kill(child, signal.SIGKILL)  # its pid is not reused before the server waits for it
            server.stdin.write("wait\n")
            server.stdin.flush()
            assert server.stdout.readline() == "ended\n"
            yield count
        server.stdin.close()


def end_of(work: Callable[[], object], *, seconds: float | None = None) -> int:
    """Runs work in a child process, kills it after `seconds`, and returns its exit code, negative for a signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
