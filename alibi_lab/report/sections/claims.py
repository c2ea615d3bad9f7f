"""The paper's claims: all verdicts, in one table per scale; and claims of other papers (`rollouts.py`)."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from alibi_lab.records import Record
from alibi_lab.report import answers, rollouts, verdicts
from alibi_lab.report.intervals import Interval
from alibi_lab.report.plots import paper_items
from alibi_lab.report.section import Archive, Block, Numbers, Section, Text
from alibi_lab.report.sections import paper_item
from alibi_lab.report.tables.cost import model_sizes
from alibi_lab.report.tables.table import Block as Rows
from alibi_lab.report.tables.table import Cell, Row, Table
from alibi_lab.report.verdicts import Verdict, because, counted, interval_text, ratio_text, why

_COLUMNS = ("verdict", "ours", "95 %", "the paper", "holds if", "from")


def find(archive: Archive) -> list[list[tuple[Record, Verdict]]]:
    """All verdicts of all items, as one entry."""
    judged = verdicts.in_order(verdicts.all_verdicts(archive.records, archive.by_identity))
    return [judged] if judged or rollouts.claims(archive.records) else []


def draw(judged: Sequence[tuple[Record, Verdict]], number: int, archive: Archive) -> Section:
    """A table per scale, and one of other papers' claims."""
    by_scale: dict[str, list[tuple[Record, Verdict]]] = {}
    for record, verdict in judged:
        by_scale.setdefault(answers.scale_of(record) or "of unknown size", []).append((record, verdict))
    anchors = {id(record): paper_item.anchor(place) for place, record in enumerate(paper_item.find(archive))}
    introduction = Text(
        Markup(
            "Each claim is about a ratio, usually of two perplexities, where below 1 is better. It is <b>contradicted</b> if "
            "the whole 95 % interval is on the wrong side of the threshold, <b>confirmed</b> if all of it is on the claim's "
            "side, and <b>open</b> otherwise, for the reason given. "
            "What explains a contradiction is our judgment. An interval over <i>seeds</i> is about other trainings; an "
            "interval over <i>parts of the text</i> is about the same models on other text. A claim that compares trainings "
            "needs several seeds. A verdict holds for models of the given size on their text, not for larger ones. Intervals "
            "are not corrected for multiple comparisons: of twenty decided claims, one may be wrong by chance."
        )
    )
    counts = {scale: counted([verdict for _, verdict in members]) for scale, members in by_scale.items()}
    blocks: list[Block] = [introduction]
    for scale, members in by_scale.items():
        caption = Markup("<h3>At scale {}</h3>{}.{}").format(scale, counts[scale], _size(members, archive))
        blocks.append(_table([_row(*one, anchors) for one in members], caption, f"The paper's claims at scale {scale}"))
    blocks += _of_others(archive.records)
    rows = (paper_items.pictures(record, archive.by_identity) for record in paper_item.find(archive))
    lead = next((plot for several in rows for row in several for plot in row), None)
    found = "; ".join(f"at scale {scale}: {count}" for scale, count in counts.items())
    found, title = f"Of the paper's claims, {found}." if found else "", "The paper's claims"
    about = "each contradicted, confirmed or open"
    return Section("claims", paper_item.GROUP, title, blocks, heading=title, about=about, finding=found, lead=lead)


def _of_others(records: Sequence[Record]) -> list[Numbers]:
    """The table of the claims of `rollouts.py`; an empty list if none was measured."""
    rows: list[Row] = []
    for claim in rollouts.claims(records):
        label = Markup('<a href="#rollout">Wu et al.</a> {}').format(claim.says)
        reason = f"over {claim.bounds.over}" if claim.bounds else "no interval"
        rows.append((label, "", _cells(claim.word, claim.ours, claim.bounds, math.nan, claim.condition, reason)))
    caption = Markup(
        "<h3>Position bias through the layers</h3>Claims of Wu, Wang, Jegelka and Jadbabaie 2025 (arXiv:2502.01951), as ratios "
        "of shares of accumulated attention in trained models."
    )
    return [_table(rows, caption, "Claims about position bias")] if rows else []


def _table(rows: Sequence[Row], caption: str, label: str) -> Numbers:
    return Numbers(Table(_COLUMNS, [Rows("", rows)], corner="claim"), caption, label, css="text claims")


def _size(members: Sequence[tuple[Record, Verdict]], archive: Archive) -> str:
    """The sizes of the models and trainings that the verdicts are based on, in words."""
    answers_ = {id(record): record for record, _ in members}.values()
    found = [one for record in answers_ for one in answers.Sources(record, archive.by_identity).records]
    weights, tokens = model_sizes(found)
    return f" Models of {weights} weights{f', trained on {tokens} tokens' if tokens else ''}." if weights else ""


def _row(record: Record, verdict: Verdict, anchors: dict[int, str]) -> Row:
    claim = verdict.claim
    explained = because(verdict, answers.scale_of(record))
    label = Markup('<a href="#{}">{}</a> {}').format(anchors[id(record)], paper_item.item_title(record), claim.says)
    reason = f"{why(verdict)}{f'. {explained}' if explained else ''}"
    return label, "", _cells(verdict.word, verdict.ours, verdict.interval, verdict.paper, claim.condition, reason)


def _cells(word: str, ours: float, bounds: Interval | None, paper: float, condition: str, reason: str) -> list[Cell]:
    """The cells of `_COLUMNS`."""
    numbers = (ratio_text(ours), interval_text(bounds), ratio_text(paper), condition)
    return [Cell(word, css=f"verdict {word}"), *map(Cell, numbers), Cell(reason, css="why")]
