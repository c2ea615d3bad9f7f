"""A benchmark: time and memory of every peer by length, and the ratio of its time to ours."""

from alibi_lab.records import Record
from alibi_lab.report.plots import benchmark as plots
from alibi_lab.report.plots.drawing import Plot
from alibi_lab.report.section import Archive, Section, code, html
from alibi_lab.report.series import sequence
from alibi_lab.report.tables.table import text_table

MEASURED = {  # the first part of a record's name
    "cpu": "Attention on a CPU",
    "jax": "Attention in JAX",
    "gpu": "On a GPU",
    "decoding": "Attention of one more token",
    "next-tokens": "Tokens after a prompt",
    "generating": "One more token of a model",
    "gates": "Forget gates",
    "embedding": "Encoders",
    "late-chunking": "Vectors of passages",
    "serving": "Patched models",
    "streaming": "Caches that forget",
    "context-parallel": "Context parallelism",
    "host": "Time of the host",
    "training": "Training steps",
}


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
    name, facts = f"b{number}", [*plots.facts(record), ("command", code(record.command))]
    body = html("benchmark", name=name, record=record, plots=drawn, table=table, rows=facts)
    found = plots.finding(record) if record is max(find(archive), key=plots.timings) else ""
    title = title_of(record)
    return Section(name, "Benchmarks", title, body, title, records=[record], finding=found, lead=drawn[0])


def title_of(record: Record) -> str:
    """What was measured: "Attention on a CPU: noise · 8 heads × 64 · float32 · to 65,536 tokens"."""
    place, _, inputs = record.name.partition("/")
    known = next((one for one in MEASURED if place == one or place.startswith(f"{one}-")), None)
    if known is None:
        return f"Benchmark {record.name}"
    details = (
        ", ".join(filter(None, (place.removeprefix(known).strip("-"), inputs))).replace("-", " ").replace("/", ", ")
    )
    config = record.config
    lengths = [length for length in sequence(config.get("lengths")) if isinstance(length, int)]
    facts = [
        f"{MEASURED[known]}: {details}" if details else MEASURED[known],
        f"{config['heads']} heads × {config['head_dim']}" if {"heads", "head_dim"} <= config.keys() else "",
        str(config.get("dtype", "")),
        f"to {max(lengths):,} tokens" if lengths else "",
    ]
    return " · ".join(filter(None, facts))
