"""`alibi report`: a page, or the paper's claims, from records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from alibi_attn.cli.console import check_writable, console, needs, print_path
from alibi_lab import records
from alibi_lab.cli.options import documented
from alibi_lab.report import answers, rollouts
from alibi_lab.report import verdicts as claims
from alibi_lab.report.intervals import Interval
from alibi_lab.report.verdicts import counted, interval_text, ratio_text, why


@documented
def report(
    paths: Annotated[list[Path], typer.Argument(show_default=False)],
    out: Path = Path("report.html"),
    title: str = "Train short, test long",
    verdicts: bool = False,
) -> None:
    """Write one self-contained HTML page with figures, tables and verdicts from records.

    [dim]alibi report runs/quick --out quick.html[/]

    [dim]alibi report runs/first runs/second[/]    several runs on one page

    [dim]alibi report runs/paper --verdicts[/]    one line per claim of the paper, with the reason

    Args:
        paths: Record files (.json or .jsonl), or folders of runs.
        out: HTML page to write.
        title: Title of the page.
        verdicts: Print the paper's claims, contradicted, confirmed or open, instead of a page.
    """
    if not verdicts:
        check_writable(out)
    loaded = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not loaded:
        raise ValueError(
            f"there are no records (.json, .jsonl) in {', '.join(map(str, paths))}; write some with alibi run or alibi bench"
        )
    if verdicts:
        print_verdicts(loaded)
    else:
        write_report(loaded, out, title=title)


def write_report(loaded: Sequence[records.Record], path: Path, **title: str) -> None:
    """Writes the page and prints its path."""
    with needs("lab"):
        from alibi_lab.report import page
    print_path("report", page.write_report(loaded, path, **title))


def print_verdicts(found: Sequence[records.Record]) -> None:
    """One line per claim of the paper, contradictions first, and the counts at the end."""
    by_identity = {records.identity(one.kind, one.name, one.config): one for one in found}
    unique = list(by_identity.values())
    judged, others = claims.in_order(claims.all_verdicts(unique, by_identity)), rollouts.claims(unique)
    if not judged and not others:
        raise ValueError(
            "no answer to a figure or table of the paper is among these records; alibi run paper makes them"
        )
    for record, one in judged:
        scale = answers.scale_of(record)
        place = f"{answers.item_name(record)}{f' ({scale})' if scale else ''}"
        condition = f"{one.claim.condition}; {why(one)}"
        _print_claim(one.word, f"{place}: {one.claim.says}", one.ours, one.interval, condition)
    scales = dict.fromkeys(answers.scale_of(record) for record, _ in judged)
    for scale in scales:
        group = [one for record, one in judged if answers.scale_of(record) == scale]
        console.print(escape(f"{f'{scale}: ' if len(scales) > 1 else ''}{counted(group)}"))
    for other in others:
        _print_claim(other.word, f"Wu et al. 2025: {other.says}", other.ours, other.bounds, other.condition)


def _print_claim(word: str, says: str, ours: float, bounds: Interval | None, condition: str) -> None:
    between = f" [{interval_text(bounds)}]" if bounds else ""
    line = f"{word:<12}  {says}: {ratio_text(ours)}{between}, holds if {condition}"
    console.print(escape(line), soft_wrap=True, highlight=False)
