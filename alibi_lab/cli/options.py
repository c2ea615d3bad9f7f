"""Options of commands: their help, from the command's docstring, values that a config refuses, and those about texts."""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from alibi_lab.lab.config import ConfigError

Command = TypeVar("Command", bound=Callable[..., None])
TextField = Annotated[
    str, typer.Option(help="Field of the text in JSON, JSON Lines, CSV, TSV and Parquet files.", show_default="text")
]


def documented(command: Command) -> Command:
    """Gives the arguments of a command the help that its docstring has under "Args:", which ends the docstring.

    An option that is off by default gets no opposite, as in --dry-run without --no-dry-run.
    """
    command.__doc__, _, arguments = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    defaults = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
    for name, text in argument_help(arguments).items():
        kind: Any = command.__annotations__[name]
        given = getattr(kind, "__metadata__", ())  # of Annotated[kind, given]
        flag = (f"--{name.replace('_', '-')}",) if defaults[name] is False else ()
        info = copy.copy(given[0]) if given else typer.Option(*flag)
        info.help = text
        command.__annotations__[name] = Annotated[kind.__origin__ if given else kind, info]
    return command


@contextlib.contextmanager
def usage_errors(worded: Callable[[str], str] = str) -> Iterator[None]:
    """Ends the command as used wrongly, with the message of a ConfigError in the block."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(worded(str(error))) from None


def argument_help(docstring: str) -> dict[str, str]:
    """The texts of the documented arguments, by name."""
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", docstring, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def joined(text: Sequence[Path]) -> str:
    """The value of the field data.text."""
    for path in text:
        if "," in str(path):
            raise typer.BadParameter(f"--text {path} has a comma in its name, but commas separate files; rename it")
    return ",".join(map(str, text))
