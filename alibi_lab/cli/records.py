"""`alibi records`: keeps the records of finished studies in few files."""

from pathlib import Path
from typing import Annotated

import typer

from alibi_attn.cli.console import check_writable, console
from alibi_lab import records
from alibi_lab.cli.options import documented

app = typer.Typer(help="Keep the records of finished studies in few files.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Without it, typer would make `pack` the group itself."""


@app.command()
@documented
def pack(
    paths: Annotated[list[Path], typer.Argument(show_default=False)],
    out: Annotated[Path, typer.Option(show_default=False)],
    replace: bool = False,
) -> None:
    """Collect records in one JSON Lines file: one per line, sorted, with their checksums. The record files stay.

    [dim]alibi records pack runs/slopes/records --out results/slopes.jsonl[/]

    Every command that reads records reads such files too.

    Args:
        paths: Record files (.json or .jsonl), or folders of records.
        out: File to write, or to add to (.jsonl).
        replace: Replace records that the file has already, after they were measured again.
    """
    check_writable(out)
    before = sum(1 for _ in records.find(out)) if out.exists() else 0
    after = records.pack(paths, out, replace=replace)
    console.print(f"{out}: {after} records, {after - before} of them new", soft_wrap=True)
