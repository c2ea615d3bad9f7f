"""Curves of a benchmark's record: by peer, columns that grow by a row for every length, and the record grows with them."""

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path

from alibi_attn import records

Columns = dict[str, dict[str, list[records.Json]]]


@dataclasses.dataclass(frozen=True)
class GrowingRecord:
    """A benchmark's record that is kept after every length, so that ending early loses nothing.

    Args:
        summary: its metrics from its curves.
    """

    out: Path
    name: str
    config: Mapping[str, records.Json]
    summary: Callable[[Columns], Mapping[str, float | None]]
    curves: Columns = dataclasses.field(default_factory=dict)
    started: datetime.datetime = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    def keep(self) -> Path:
        """Write it, in the place of what it was before; its path.

        Raises:
            FileExistsError: another measurement has answered the same question.
        """
        made = records.make(
            "benchmark", self.name, config=self.config, metrics=self.summary(self.curves), curves=self.curves,
            started=self.started,
        )  # fmt: skip
        return records.grow(made, self.out)


def append(columns: Columns, name: str, row: Mapping[str, records.Json]) -> None:
    """Add a row to the columns of one peer."""
    for column, figure in row.items():
        columns.setdefault(name, {}).setdefault(column, []).append(figure)
