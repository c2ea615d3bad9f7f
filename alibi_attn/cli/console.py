"""Output and errors of the commands: consoles, progress, one-sentence errors, missing extras, renamed options."""

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alibi_attn.lab.config import METHOD_MODULE

Value = TypeVar("Value")

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def progress() -> Progress:
    """A bar that counts finished items, on stderr; nothing is drawn outside a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def print_path(label: str, path: Path) -> None:
    """Prints the path of a file that was written, in one line."""
    console.print(f"{label}  {escape(str(path))}", soft_wrap=True)


def check_writable(path: Path) -> None:
    """Raises an OSError if this file cannot be written, so that a command fails before it does any work."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the name of a file")
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


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Ends the command with the extra to install if an import inside the block finds a package missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "alibi_attn":
            raise
        fail(f'this command needs {error.name.split(".")[0]}; install it with: pip install "alibi-attn[{extra}]"')


def sentence(error: Exception) -> str:
    """The error in one sentence, without the number that Python puts in front of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def is_ours(error: Exception) -> bool:
    """Whether code of this package raised the error, rather than a library that it calls."""
    return _raised_in(error) == "alibi_attn"


def error_in_method(error: BaseException) -> str | None:
    """File, line and message of an error in the file of a position method; None for any other error.

    An error of a library belongs to the code that called it: the last frame of such a file or of this package decides.
    """
    frames = traceback.walk_tb(error.__traceback__)
    named = [(str(frame.f_globals.get("__name__")), frame.f_code.co_filename, line) for frame, line in frames]
    callers = [one for one in named if one[0].startswith(("alibi_attn.", METHOD_MODULE))]
    if not callers:
        return None
    name, path, line = callers[-1]
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and name == "alibi_attn.lab.model.imported_method":
        path, line, message = str(error.filename), error.lineno or 1, error.msg
    elif not name.startswith(METHOD_MODULE):
        return None
    here = Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{here}, line {line}: {type(error).__name__}: {message}"


def foreign_exit(error: SystemExit) -> str | None:
    """File and line of a call of `sys.exit` outside of this package and of its command line; None for our own.

    A position method or a library that exits would end a command without its result, possibly with the exit code 0.
    """
    raised: BaseException = error
    if _raised_in(raised) in ("click", "typer") and raised.__context__ is not None:
        raised = raised.__context__  # the command line turns its own exceptions into SystemExit
    if (theirs := error_in_method(raised)) is not None:
        return theirs
    if _raised_in(raised) in ("alibi_attn", "click", "typer", "__main__", ""):
        return None
    frame, line = list(traceback.walk_tb(raised.__traceback__))[-1]
    return f"{frame.f_code.co_filename}, line {line}: {type(raised).__name__}: {raised}"


def _raised_in(error: BaseException) -> str:
    """The package of the code that raised the error; "" if nothing did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] if frames else ""


def fail(message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)


def interrupted(advice: str = "no partial files are left") -> NoReturn:
    errors.print(f"\n[bold]interrupted[/]; {escape(advice)}")
    sys.exit(130)


def renamed(old: str, new: str, given: Value | None, value: Value) -> Value:
    """The value of an option. Its old spelling works for one more release, takes precedence, and prints a warning."""
    if given is None:
        return value
    errors.print(
        f"[bold yellow]warning:[/] {escape(old)} is now {escape(new)}; the next release removes the old spelling"
    )
    return given
