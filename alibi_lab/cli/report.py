"""`alibi report`: a page, or the paper's claims, from records."""

from pathlib import Path
from typing import Annotated

import typer

from alibi_attn.cli.console import check_writable
from alibi_lab import records
from alibi_lab.cli import lab


def report(
    paths: Annotated[list[Path], typer.Argument(help="Record files (.json), or folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Train short, test long",
    verdicts: Annotated[
        bool,
        typer.Option(
            "--verdicts", help="Print the paper's claims, contradicted, confirmed or open, instead of a page."
        ),
    ] = False,
) -> None:
    """Write one self-contained HTML page with figures, tables and conclusions from records.

    [dim]alibi report runs/quick --out quick.html[/]

    [dim]alibi report runs/first runs/second[/]    several runs on one page

    [dim]alibi report runs/paper --verdicts[/]    one line per claim of the paper, with the reason
    """
    if not verdicts:
        check_writable(out)
    loaded = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not loaded:
        raise ValueError(
            f"there are no records (.json) in {', '.join(map(str, paths))}; write some with alibi run or alibi bench"
        )
    if verdicts:
        lab.print_verdicts(loaded)
    else:
        lab.write_report(loaded, out, title=title)
