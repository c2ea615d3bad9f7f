"""A benchmark: time and memory of every peer by length, and the ratio of its time to ours."""

from alibi_lab.records import Record
from alibi_lab.report.plots import benchmark as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Block, Facts, Numbers, Section, Text, aged, code, panels
from alibi_lab.report.tables.table import text_table


def find(archive: Archive) -> list[Record]:
    """The benchmarks that have times by length."""
    return [record for record in archive.records if plots.is_drawn(record)]


def draw(record: Record, number: int, archive: Archive) -> Section:
    """Two pictures, the ratios, and the record's other facts."""
    lengths, rows = plots.ratio_table(record)
    description = f"Time against length of {', '.join(label for label, _ in rows)}; the table below has the ratios."
    caption = "Lower is better. A peer's line ends where it needs too much memory or time."
    drawn = [Plot("", caption, plots.times_by_length(record), description)]
    memory = plots.memory_by_length(record)
    drawn += [Plot("", "Peak memory.", memory, "Peak memory against length.")] if memory else []
    table = text_table(("time relative to ours", *lengths), [(label, *cells) for label, cells in rows])
    blocks: list[Block] = [
        Text("Times are forward plus backward if both were measured."),
        *aged([record]),
        *panels(drawn, f"b{number}"),
        Numbers(table, label=f"Ratios of benchmark {record.name}"),
        Facts([*plots.facts(record), ("command", code(record.command))]),
    ]
    found = plots.finding(record) if record is max(find(archive), key=plots.timings) else ""
    group, name = "Benchmarks", record.name
    return Section(
        f"b{number}", group, name, blocks, f"Benchmark {name}", records=[record], finding=found, lead=drawn[0]
    )
