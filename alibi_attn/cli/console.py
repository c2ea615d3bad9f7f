"""What the commands say, and how they fail: the console, one sentence for an error, an extra that is missing."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Before any work: can this file be written? Leaves nothing behind."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the name of a file")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise OSError(f"{folder} cannot be written ({reason}); pass a folder that you may write, with --out") from None


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Names the extra to install where an import inside finds a package missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "alibi_attn":
            raise
        fail(f'this command needs {error.name.split(".")[0]}; install it with: pip install "alibi-attn[{extra}]"')


def sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def is_ours(error: Exception) -> bool:
    """Was it raised by a line of this package, on purpose, and not somewhere below?"""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "alibi_attn"


def fail(words: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(words)}")
    sys.exit(1)


def interrupted(advice: str = "nothing half-written is left behind") -> NoReturn:
    errors.print(f"\n[bold]interrupted[/]; {escape(advice)}")
    sys.exit(130)
