"""Starts a process group by forks of this process, which has loaded torch, with the environment that torchrun gives."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable


def free_port() -> str:
    """A port of this machine that nothing uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def exit_codes(work: Callable[..., None], *arguments: object, ranks: int = 2) -> list[int | None]:
    """The exit codes of processes that each call `work(rank, *arguments)`."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, ranks, port, work, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _rank(rank: int, ranks: int, port: str, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    work(rank, *arguments)
    sys.stdout.flush()
    os._exit(0)
