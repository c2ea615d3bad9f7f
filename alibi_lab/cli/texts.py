"""The options of commands that read texts: files or folders, and the field of the text in them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

TextField = Annotated[
    str, typer.Option(help="Field of the text in JSON, JSON Lines, CSV, TSV and Parquet files.", show_default="text")
]


def joined(text: Sequence[Path]) -> str:
    """The value of the field data.text."""
    for path in text:
        if "," in str(path):
            raise typer.BadParameter(f"--text {path} has a comma in its name, but commas separate files; rename it")
    return ",".join(map(str, text))
