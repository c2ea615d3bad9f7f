"""Runs commands of `alibi` in this process."""

import re

from typer.testing import CliRunner

from alibi_lab.cli.main import app

EXPECTED = (OSError, ImportError, NotImplementedError, TypeError, ValueError)


def alibi(*arguments: object, code: int = 0) -> str:
    """What a command prints that ends with this code; with 1, its error; with 2, the lines of its message as one."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
    assert result.exit_code == code, (result.output, result.exception)
    assert code != 1 or isinstance(result.exception, EXPECTED), "it would end with a traceback"
    return (result.stdout, str(result.exception), re.sub(r"[│\s]+", " ", result.output))[min(code, 2)]
