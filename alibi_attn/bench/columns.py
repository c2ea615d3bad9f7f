"""Curves of a benchmark's record: by peer, columns that grow by a row for every length."""

from collections.abc import Mapping

from alibi_attn import records

Columns = dict[str, dict[str, list[records.Json]]]


def append(columns: Columns, name: str, row: Mapping[str, records.Json]) -> None:
    """Add a row to the columns of one peer."""
    for column, figure in row.items():
        columns.setdefault(name, {}).setdefault(column, []).append(figure)
