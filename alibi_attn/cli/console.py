"""Output and errors of the commands: consoles, progress, one-sentence errors, missing extras."""

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alibi_attn.strict_json import lone_surrogate

_EXPECTED = (ValueError, TypeError, ImportError, NotImplementedError)  # what these packages raise, besides OSError

_BROKEN_PIPE = 141  # as of a program that SIGPIPE ends

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def progress() -> Progress:
    """A bar that counts finished items, on stderr; nothing is drawn outside a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def quiet_loading() -> None:
    """Turns off the bars that transformers draws while it loads, outside a terminal: they would fill a log."""
    if not errors.is_terminal:
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def print_path(label: str, path: Path) -> None:
    """Prints the path of a file that was written, in one line."""
    console.print(f"{label}  {escape(str(path))}", soft_wrap=True)


def check_writable(path: Path) -> None:
    """Raises an OSError or a ValueError if this file cannot be written, so that a command fails before it does any work."""
    check_name(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the name of a file")
    if path.exists() and (not path.is_file() or path.absolute().is_relative_to("/dev")):
        # Files are written under another name and renamed, which would replace the device.
        raise OSError(f"{path} is a device or a pipe; pass the name of a file")
    folder = path
    while not folder.exists():
        if folder.is_symlink():
            raise FileNotFoundError(
                f"{folder} is a symbolic link to {folder.readlink()}, which does not exist; pass another path"
            )
        folder = folder.parent
    folder = folder if folder != path else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise OSError(f"{folder} cannot be written ({reason}); pass a path in a writable folder") from None


def check_name(path: Path) -> None:
    """Raises a ValueError for a name that is not UTF-8, which neither records nor tables can hold."""
    if lone_surrogate(str(path)):
        raise ValueError(f"{str(path)!a} is a name that is not UTF-8; rename it, or pass another")


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Ends the command with the extra to install if an import inside the block finds a package missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("alibi_attn", "alibi_lab"):
            raise
        fail(f'this command needs {error.name.split(".")[0]}; install it with: pip install ".[{extra}]" in a clone')


def sentence(error: Exception) -> str:
    """The error in one sentence, without the number that Python puts in front of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def run(app: Callable[[], object], ours: Sequence[str], explained: Callable[[BaseException], str | None]) -> None:
    """Runs a command line and exits; an expected error ends it with one sentence.

    Args:
        ours: names of packages: an error that their code raises, rather than a library that they call, is expected.
        explained: the sentence of an error that needs another one than its message, else None.
    """
    try:
        app()
    except BrokenPipeError:
        sys.exit(_BROKEN_PIPE)
    except Exception as error:
        if (message := explained(error)) is not None:
            fail(message)
        if not isinstance(error, OSError) and not (isinstance(error, _EXPECTED) and _raised_in(error) in ours):
            raise
        fail(sentence(error))
    except KeyboardInterrupt:
        interrupted()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # which rich and typer turn into it
            sys.exit(_BROKEN_PIPE)
        if (message := _foreign_exit(error, ours, explained)) is not None:
            fail(message)
        raise


def fail(message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)


def interrupted(advice: str = "no partial files are left") -> NoReturn:
    errors.print(f"\n[bold]interrupted[/]; {escape(advice)}")
    sys.exit(130)


def _foreign_exit(
    error: SystemExit, ours: Sequence[str], explained: Callable[[BaseException], str | None]
) -> str | None:
    """File and line of a call of `sys.exit` outside of these packages and of the command line; None for our own.

    A position method or a library that exits would end a command without its result, possibly with the exit code 0.
    """
    raised: BaseException = error
    if _raised_in(raised) in ("click", "typer") and raised.__context__ is not None:
        raised = raised.__context__  # the command line turns its own exceptions into SystemExit
    if (message := explained(raised)) is not None:
        return message
    if _raised_in(raised) in (*ours, "click", "typer", "__main__", ""):
        return None
    frame, line = list(traceback.walk_tb(raised.__traceback__))[-1]
    return f"{frame.f_code.co_filename}, line {line}: {type(raised).__name__}: {raised}"


def _raised_in(error: BaseException) -> str:
    """The package of the code that raised the error; "" if nothing did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] if frames else ""
