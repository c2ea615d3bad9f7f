"""The library's part of the command `alibi`: commands about attention and models. Each is a function that imports what it needs
when it runs and ends with an exit code:

    0 done    1 failed, with a one-sentence error    2 wrong usage    130 interrupted    141 the reader of its output has gone

Only numpy, typer and rich are imported before a command runs. `python -m alibi_attn` is these commands alone; the command
`alibi` adds those of the laboratory.
"""

from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from alibi_attn.cli import console
from alibi_attn.cli.embed import embed
from alibi_attn.cli.eval_text import eval_text
from alibi_attn.cli.explain import explain

COMMANDS: dict[str, Callable[..., None]] = {"explain": explain, "eval-text": eval_text, "embed": embed}


class _Commands(TyperGroup):
    """Commands whose errors about a value do not begin with "Value error, ", which pydantic puts in front of typer's own."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def command_line(help_text: str) -> typer.Typer:
    """A command line without commands, with the options and the style of `alibi`."""
    app = typer.Typer(
        name="alibi",
        cls=_Commands,
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    return app


def main() -> None:
    """Runs the library's commands and exits."""
    app = command_line(
        "Attention with linear biases (ALiBi): inspect it, read and embed texts with models.\n\n"
        "Training, benchmarks and reports are commands of [bold]python -m alibi_lab[/], which is [bold]alibi[/]."
    )
    for name, command in COMMANDS.items():
        app.command(name)(command)
    console.run(app, ("alibi_attn",), lambda error: None)


def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"alibi-attn {metadata.version('alibi-attn')}")
        raise typer.Exit
