"""Runs Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def printed(*arguments: object, cwd: Path | None = None, timeout: float = 280, **variables: str) -> str:
    """What Python with these arguments prints, with more environment variables; never in a process that interprets kernels.

    Raises:
        AssertionError: what it wrote, if it fails.
    """
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
