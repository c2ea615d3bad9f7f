"""The command `alibi`: the library's commands (`alibi_attn/cli/main.py`) and those that train, test, measure and report.

Only numpy, typer and rich are imported before a command runs. Next: `run.py`, which trains and tests, and
`recipes/index.py`, the recipes that it runs.
"""

import traceback
from pathlib import Path

from alibi_attn.cli import console
from alibi_attn.cli.main import COMMANDS, command_line
from alibi_lab.cli import bench, checkpoints, heads, report, run
from alibi_lab.lab.config import METHOD_MODULE
from alibi_lab.recipes.index import RECIPES

app = command_line(
    "Attention with linear biases (ALiBi): inspect it, benchmark it, train short and test long, embed texts.\n\n"
    "New here? [bold]alibi run[/] trains four position methods in a few minutes and writes a report."
)
app.add_typer(bench.app, name="bench")
app.command(epilog=f"Recipes: {', '.join(RECIPES)}. `alibi config` lists the fields of --set.")(run.run)
app.command("recipes")(run.list_recipes)
app.command("config")(run.show_config)
app.command("eval")(checkpoints.evaluation)
app.command("eval-text")(COMMANDS["eval-text"])
app.command()(checkpoints.generate)
app.command()(checkpoints.export)
app.command("embed")(COMMANDS["embed"])
app.add_typer(heads.app, name="heads")
app.command()(report.report)
app.add_typer(report.records_app, name="records")
app.command("explain")(COMMANDS["explain"])


def main() -> None:
    """Runs the command line and exits."""
    console.run(app, ("alibi_attn", "alibi_lab"), error_in_method)


def error_in_method(error: BaseException) -> str | None:
    """File, line and message of an error in the file of a position method; None for any other error.

    An error of a library belongs to the code that called it: the last frame of such a file or of these packages decides.
    """
    frames = traceback.walk_tb(error.__traceback__)
    named = [(str(frame.f_globals.get("__name__")), frame.f_code.co_filename, line) for frame, line in frames]
    callers = [one for one in named if one[0].startswith(("alibi_attn.", "alibi_lab.", METHOD_MODULE))]
    if not callers:
        return None
    name, path, line = callers[-1]
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and name == "alibi_lab.lab.model.method_checks":
        path, line, message = str(error.filename), error.lineno or 1, error.msg
    elif not name.startswith(METHOD_MODULE):
        return None
    here = Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{here}, line {line}: {type(error).__name__}: {message}"
