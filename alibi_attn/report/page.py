"""The page: records in, one self-contained HTML file out, which opens offline, on a phone, in print, in light and dark.

`tables.py` has the numbers, `figures.py` and `heads.py` the pictures, `sentences.py` the words, `page.html` the place of
each. A part whose records are missing is left out; records of kinds that this page does not draw are listed.
"""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from alibi_attn.records import Record, replace_file
from alibi_attn.report import benchmarks, figures, heads, sentences, tables
from alibi_attn.report.series import METHODS, Mode, Study, other_records, studies

TITLE = "Train short, test long"


def write_report(records: Sequence[Record], path: Path, *, title: str = TITLE, question: str | None = None) -> Path:
    """Write the report of the records to one HTML file, whole or not at all, and return its path.

    Args:
        records: of any kinds, in any order; none at all gives a page that says how to make some.
        question: the sentence under the title; by default what the records ask.

    Raises:
        OSError: the file cannot be written.
    """
    return replace_file(path, report_html(records, title=title, question=question).encode())


def report_html(records: Sequence[Record], *, title: str = TITLE, question: str | None = None) -> str:
    """The page that `write_report` writes, as text; equal records give equal text."""
    found = studies(records)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        question=question or (sentences.question(found) if found else ""),
        studies=[_study(study, f"s{number}") for number, study in enumerate(found)],
        benchmarks=[_benchmark(record, f"b{i}") for i, record in enumerate(records) if benchmarks.is_drawn(record)],
        others=tables.other_rows([record for record in other_records(records) if not benchmarks.is_drawn(record)]),
        provenance=tables.provenance(records),
        count=len(records),
    )


def _benchmark(record: Record, name: str) -> dict[str, object]:
    """What the template shows of one benchmark."""
    lengths, rows = benchmarks.ratio_table(record)
    description = f"Time against length of {', '.join(label for label, _ in rows)}; the table below has the ratios."
    return {
        "title": record.name,
        "picture": _picture(benchmarks.times_by_length(record), name, description),
        "lengths": lengths,
        "rows": rows,
        "facts": benchmarks.facts(record),
        "command": record.command,
    }


def _study(study: Study, name: str) -> dict[str, object]:
    """What the template shows of one study; `name` is the prefix of its ids."""
    head_counts = sentences.head_counts(study)
    longest = max([*study.lengths, *study.trained])
    return {
        "name": name,
        "recipe": study.recipe,
        "corpus": study.corpus.get("name", ""),
        "unit": study.unit,
        "seeds": study.seeds,
        "headline": sentences.headline(study),
        "sliding": sentences.sliding_sentence(study),
        "allowed": sentences.allowed(study),
        "not_allowed": sentences.not_allowed(study),
        "methods": [(s.method if s.method in METHODS else "ink", s.label) for s in study.series],
        "cards": tables.cards(study),
        "perplexity": _panels(study, name),
        "perplexity_table": tables.by_length(study),
        "positions": _picture(
            figures.loss_by_position(study), f"{name}-positions", f"Loss by position. {_ends(study)}"
        ),
        "position_note": sentences.position_sentence(study),
        "training": _picture(figures.training_curves(study), f"{name}-training", "Training loss of every run by step."),
        "speed": _picture(
            figures.cost_by_length(study, "tokens_per_second"),
            f"{name}-speed",
            "Tokens evaluated per second, by length, for every method; the table below has the numbers.",
        ),
        "memory": _picture(
            figures.cost_by_length(study, "peak_memory_bytes"),
            f"{name}-memory",
            "Peak memory of the evaluation, by length, for every method; the table below has the numbers.",
        ),
        "cost_tables": [table for table in (tables.training_cost(study), tables.evaluation_cost(study)) if table],
        "heads": [
            {
                "count": count,
                "length": longest,
                "grid": _picture(
                    heads.bias_grid(count, longest),
                    f"{name}-heads{count}",
                    f"The causal biases of {count} heads over {longest:,} tokens: from a thin diagonal to a full triangle.",
                ),
                "factors": _picture(
                    heads.factor_curves(count, longest),
                    f"{name}-factors{count}",
                    f"The factor that each of {count} heads leaves a key, by distance: steep heads forget within a few tokens.",
                ),
                "table": tables.head_rows(count),
            }
            for count in head_counts
        ],
        "fields": tables.fields(study),
        "facts": tables.corpus_facts(study),
    }


def _panels(study: Study, name: str) -> list[tuple[str, str, Markup]]:
    captions: tuple[tuple[Mode, str, str], ...] = (
        ("nonoverlapping", "Nonoverlapping windows", "The text is cut into pieces; each is read from nothing."),
        (
            "sliding",
            "Sliding window",
            "Windows overlap; only their last tokens are scored, so that each has seen a long context.",
        ),
    )
    panels = []
    for mode, heading, caption in captions:
        description = f"Perplexity by length, {heading.lower()}. {_ends(study, mode)}"
        picture = _picture(figures.perplexity_by_length(study, mode), f"{name}-{mode}", description)
        if picture is not None:
            panels.append((heading, caption, picture))
    return panels


def _picture(figure: Figure | None, name: str, description: str) -> Markup | None:
    return None if figure is None else Markup(figures.svg(figure, name, description))


def _ends(study: Study, mode: Mode = "nonoverlapping") -> str:
    """Where each line starts and ends, for readers who do not see it."""
    said = []
    for series in study.series:
        between = sentences.ends(series, mode)
        if between:
            first, last = (tables.mean(sentences.perplexity(series, length, mode)) for length in between)
            said.append(
                f"{series.label}: perplexity {first:.3g} at {between[0]:,} tokens, {last:.3g} at {between[1]:,}."
            )
    return " ".join(said)
