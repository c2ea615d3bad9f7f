"""Prints perplexities and curves of records as tables."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable

from alibi_attn.cli.console import console
from alibi_lab import records
from alibi_lab.report.series import studies
from alibi_lab.report.tables import study as tables


def print_perplexities(loaded: Sequence[records.Record]) -> None:
    """Prints one table per study."""
    for study in studies(loaded):
        found = [table for table in (tables.by_length(study), tables.in_other_units(study)) if table]
        for columns, block in ((table.columns, block) for table in found for block in table.blocks):
            if not block.title.startswith(f"Perplexity per {study.unit}"):
                continue  # only the report shows the other units
            table = RichTable("", *(Column(name, justify="right") for name in columns), box=None)
            for label, _, cells in block.rows:
                table.add_row(label, *(f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells))
            console.print(f"\n[bold]{escape(block.title)}[/], by length in {study.unit}s", soft_wrap=True)
            console.print(table)
        if study.lengths:
            longest = f"{max(study.lengths):,}"
            console.print(f"[dim]all lengths score the same tokens; compare only with runs tested up to {longest}[/]")


def print_curves(curves: Mapping[str, Mapping[str, Sequence[records.Json]]]) -> None:
    """Prints one table per curve."""
    for name, columns in curves.items():
        table = RichTable(*columns, title=name, title_justify="left", box=None)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
        console.print(table)
