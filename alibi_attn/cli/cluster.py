"""The option --ray: connects a command to a Ray cluster, or starts one on this machine."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from alibi_attn.cli.console import needs

_ADDRESS = re.compile(r"local|auto|(ray://)?[\w.-]+:\d+|(ray://)?\[[\da-fA-F:]+\]:\d+")


def _checked(address: str | None) -> str | None:
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ValueError(f"--ray is {address!r}; pass local, auto, or an address such as 10.0.0.1:6379")
    return address


Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        callback=_checked,
        help='Run on a Ray cluster: "local" starts one on this machine, "auto" joins one that runs here, or its address.',
        show_default=False,
    ),
]


@contextlib.contextmanager
def cluster(address: str, *, show_output: bool = False) -> Iterator[None]:
    """Connects to a Ray cluster while the block runs.

    Args:
        address: as for `ray.init`.
        show_output: whether to print what the workers print.

    Raises:
        ConnectionError: there is no cluster.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # Ray takes lines that differ in numbers for repetitions
    with needs("ray"):
        import ray
    try:
        ray.init(address, include_dashboard=False, log_to_driver=show_output, logging_level=logging.WARNING)
    except ConnectionError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"--ray {address} found no Ray cluster ({reason}); start one with: ray start --head"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
