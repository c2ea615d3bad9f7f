"""`alibi report` and `alibi records`: a page, tables or the paper's claims from records, and records in few files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable

from alibi_attn.cli.console import check_writable, console, errors, needs, print_path, progress
from alibi_lab import records
from alibi_lab.cli.options import documented
from alibi_lab.report import answers, exports, rollouts
from alibi_lab.report import verdicts as claims
from alibi_lab.report.series import grouped, studies
from alibi_lab.report.tables import study as tables
from alibi_lab.report.verdicts import counted, interval_text, ratio_text, why


@documented
def report(
    paths: Annotated[list[Path], typer.Argument(show_default=False)],
    out: Path = Path("report.html"),
    title: str = "Train short, test long",
    verdicts: bool = False,
    compare: str = "",
    csv: bool = False,
    latex: bool = False,
    markdown: bool = False,
) -> None:
    """Write one self-contained HTML page with figures, tables and verdicts from records.

    [dim]alibi report runs/quick --out quick.html[/]

    [dim]alibi report runs/first runs/second[/]    several runs on one page

    [dim]alibi report runs/paper --verdicts[/]    one line per claim of the paper, with the reason

    [dim]alibi report runs/mine --compare alibi,rotary[/]    which of two methods is better at each length, with intervals

    [dim]alibi report runs/mine --csv > mine.csv[/]    perplexities as a table, also --latex and --markdown

    Args:
        paths: Record files (.json or .jsonl), or folders of runs.
        out: HTML page to write.
        title: Title of the page.
        verdicts: Print the paper's claims, contradicted, confirmed or open, instead of a page.
        compare: Print the ratio of two methods' perplexities with intervals, instead of a page; as in alibi,rotary.
        csv: Print one row per perplexity, instead of a page.
        latex: Print tables for LaTeX, instead of a page.
        markdown: Print tables in Markdown, instead of a page.
    """
    forms = {"csv": csv, "latex": latex, "markdown": markdown, "verdicts": verdicts, "compare": compare}
    printed = [name for name, given in forms.items() if given]
    if len(printed) > 1:
        raise typer.BadParameter(
            f"{' and '.join(f'--{name}' for name in printed)} print different things; pass one of them"
        )
    if not printed:
        check_writable(out)
    with errors.status("reading records"):
        loaded = list(records.find(*(path / "records" if (path / "records").is_dir() else path for path in paths)))
    if not loaded:
        raise ValueError(
            f"there are no records (.json, .jsonl) in {', '.join(map(str, paths))}; write some with alibi run or alibi bench"
        )
    if verdicts:
        print_verdicts(loaded)
    elif compare:
        print_comparison(loaded, compare)
    elif printed:
        typer.echo(exports.exported(loaded, cast("exports.Form", printed[0])), nl=False)
    else:
        write_report(loaded, out, title=title)


def write_report(loaded: Sequence[records.Record], path: Path, **title: str) -> None:
    """Writes the page and prints its path."""
    with needs("lab"):
        from alibi_lab.report import page
    with progress() as bar:
        task = bar.add_task("drawing sections", total=None)
        written = page.write_report(
            loaded, path, **title, progress=lambda n, of: bar.update(task, completed=n, total=of)
        )
    print_path("report", written)


def print_comparison(found: Sequence[records.Record], methods: str) -> None:
    """One row per length and kind of window; the last column is the verdict."""
    first, comma, second = (name.strip() for name in methods.partition(","))
    if not (first and comma and second) or "," in second:
        raise typer.BadParameter(f"--compare is {methods!r} but must be two methods, as in alibi,rotary")
    rows, place = list[tuple[str, ...]](), None
    for one in exports.compared(found, first, second):
        if place != (one.study, one.trained):
            place = one.study, one.trained
            rows.append((f"[bold]{escape(one.study)}, trained at {one.trained:,}[/]",))
        between = f"{one.bounds.low:.3f} to {one.bounds.high:.3f}" if one.bounds else "one seed"
        rows.append((one.window, f"{one.length:,}", f"{one.ratio:.3f}", between, one.word))
    console.print(
        escape(f"perplexity of {first} divided by that of {second}; 95 % over seeds and text"), soft_wrap=True
    )
    print_table(("window", *map(right, ("length", "ratio", "95 %")), ""), rows)


def print_verdicts(found: Sequence[records.Record]) -> None:
    """One line per claim of the paper, contradictions first, and the counts at the end."""
    by_identity = {records.identity(one.kind, one.name, one.config): one for one in found}
    unique = list(by_identity.values())
    judged, others = claims.all_verdicts(unique, by_identity), rollouts.claims(unique)
    if not judged and not others:
        raise ValueError(
            "no answer to a figure or table of the paper is among these records; alibi run paper makes them"
        )
    by_scale = grouped(judged, lambda one: answers.scale_of(one[0]))
    for record, one in judged:
        scale = answers.scale_of(record)
        place = f"{answers.item_name(record)}{f' ({scale})' if scale else ''}"
        _print_claim(one, place, f"; {why(one)}")
    for scale, members in by_scale.items():
        console.print(escape(f"{f'{scale}: ' if len(by_scale) > 1 else ''}{counted([one for _, one in members])}"))
    for other in others:
        _print_claim(other, "Wu et al. 2025")


def _print_claim(one: claims.Verdict, place: str, reason: str = "") -> None:
    between = f" [{interval_text(one.interval)}]" if one.interval else ""
    line = f"{one.word:<12}  {place}: {one.claim.says}: {ratio_text(one.ours)}{between}"
    console.print(escape(f"{line}, holds if {one.claim.condition}{reason}"), soft_wrap=True, highlight=False)


def print_perplexities(loaded: Sequence[records.Record]) -> None:
    """Prints one table per study."""
    for study in studies(loaded):
        found = [table for table in (tables.by_length(study), tables.in_other_units(study)) if table]
        for columns, block in ((table.columns, block) for table in found for block in table.blocks):
            if not block.title.startswith(f"Perplexity per {study.unit}"):
                continue  # only the report shows the other units
            console.print(f"\n[bold]{escape(block.title)}[/], by length in {study.unit}s", soft_wrap=True)
            rows = (
                (label, *(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells))
                for label, _, cells in block.rows
            )
            print_table(("", *map(right, columns)), rows)
        if study.lengths:
            longest = f"{max(study.lengths):,}"
            console.print(f"[dim]all lengths score the same tokens; compare only with runs tested up to {longest}[/]")


def print_curves(curves: Mapping[str, Mapping[str, Sequence[records.Json]]]) -> None:
    """Prints one table per curve."""
    for name, columns in curves.items():
        rows = zip(*columns.values(), strict=True)
        shown = ([f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in rows)
        print_table(columns, shown, title=name, title_justify="left")


def right(name: str, **options: Any) -> Column:
    """A column of numbers, for `print_table`."""
    return Column(name, justify="right", **options)


def print_table(columns: Iterable[str | Column], rows: Iterable[Sequence[str]], **options: Any) -> None:
    """Prints a table without lines, with these options of rich; nothing if it has no rows."""
    table = RichTable(*columns, box=None, **options)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        console.print(table)


records_app = typer.Typer(help="Keep the records of finished studies in few files.", no_args_is_help=True)


@records_app.command()
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
