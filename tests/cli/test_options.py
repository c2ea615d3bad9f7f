"""The help of every argument and option, from its command's docstring or its annotation."""

import typer
from typer.main import get_command

from alibi_lab.cli.options import documented


def without_help(params) -> list[str]:
    return [param.name for param in params if not param.help]


def test_help_is_the_text_of_the_docstring() -> None:
    def greet(name: str = "you", loud: bool = False, often: int = 1) -> None:
        """Say hello.

        Args:
            name: Who is greeted, in
                two lines.
            loud: In capitals.
        """

    alone = typer.Typer(add_completion=False)
    alone.command()(documented(greet))
    command = get_command(alone)
    name, loud, often = command.params[:3]
    assert (command.help, name.help, loud.help) == ("Say hello.", "Who is greeted, in two lines.", "In capitals.")
    assert (loud.opts, loud.secondary_opts) == (["--loud"], [])
    assert without_help([name, loud, often]) == ["often"]
