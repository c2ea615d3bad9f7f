"""The biases of ALiBi, drawn once for each number of heads in the records."""

from alibi_attn import alibi_slopes
from alibi_lab.records import flat
from alibi_lab.report.plots import bias
from alibi_lab.report.section import Archive, Section, html
from alibi_lab.report.tables.heads import head_rows

_MOST_HEADS = 1024  # models with more heads are not drawn


def find(archive: Archive) -> list[tuple[int, int]]:
    """(number of heads, longest trained or tested length), one per number of heads."""
    longest: dict[int, int] = {}
    for study in archive.studies:
        records = [record for series in study.series if series.method == "alibi" for record in series.records]
        for count in [flat(record.config).get("model.num_heads") for record in records]:
            if isinstance(count, int) and 1 <= count <= _MOST_HEADS:
                longest[count] = max([longest.get(count, 1), *study.lengths, *study.trained])
    return sorted(longest.items())


def draw(heads: tuple[int, int], number: int, archive: Archive) -> Section:
    """The bias and the factor of every head, and the slopes in a table."""
    count, length = heads
    biases = [f"{slope * length:.3g}" for slope in alibi_slopes(count).tolist()]
    rows = [(*row, nats) for row, nats in zip(head_rows(count), biases, strict=True)]
    several = f": {count}" if len(find(archive)) > 1 else ""
    body = html(
        "alibi_heads", name=f"heads{count}", plots=bias.pictures(count, length, length), rows=rows, length=length
    )
    return Section(f"heads{count}", "", "", body, heading=f"The heads of ALiBi{several}")
