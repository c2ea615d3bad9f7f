"""The paper's claims: every verdict in one table per scale, ahead of the items that they are about."""

from collections.abc import Sequence

from markupsafe import Markup

from alibi_attn.records import Record
from alibi_attn.report import answers, verdicts
from alibi_attn.report.section import Archive, Numbers, Section, Text
from alibi_attn.report.sections import paper_item
from alibi_attn.report.tables.table import Block, Cell, Row, Table
from alibi_attn.report.verdicts import Verdict

_COLUMNS = ("verdict", "ours", "95 %", "the paper", "holds if", "from", "weights", "trained on")


def find(archive: Archive) -> list[list[tuple[Record, Verdict]]]:
    """All verdicts of all items; nothing where there are none."""
    judged = verdicts.in_order(verdicts.all_verdicts(archive.records, archive.by_identity))
    return [judged] if judged else []


def draw(judged: Sequence[tuple[Record, Verdict]], number: int, archive: Archive) -> Section:
    """A table per scale."""
    by_scale: dict[str, list[tuple[Record, Verdict]]] = {}
    for record, verdict in judged:
        by_scale.setdefault(answers.scale_of(record) or "of unknown size", []).append((record, verdict))
    anchors = {id(record): paper_item.anchor(place) for place, record in enumerate(paper_item.find(archive))}
    introduction = Text(
        Markup(
            "Each is a ratio, nearly always of two perplexities: below 1 is better. It is <b>contradicted</b> where the whole "
            "interval (95 %) is on the other side of what the claim asks for, <b>confirmed</b> where all of it is on the "
            "claim's side, and <b>open</b> in every other case, for the reason given. An interval over <i>seeds</i> speaks of "
            "other trainings, one over <i>parts of the text</i> of the same models on other text; a claim that compares "
            "trainings needs seeds. A verdict is about models of the size given next to it, on their text, and about nothing "
            "larger. Each interval is of one claim alone: of twenty that are decided, one may be wrong by chance."
        )
    )
    tables = [
        Numbers(
            Table(_COLUMNS, (Block("", tuple(_row(*one, anchors, archive) for one in members)),), corner="claim"),
            caption=Markup("<h3>At scale {}</h3>{}.").format(
                scale, verdicts.counted([verdict for _, verdict in members])
            ),
            label=f"The paper's claims at scale {scale}",
            css="text claims",
        )
        for scale, members in by_scale.items()
    ]
    about = "each contradicted, confirmed or open"
    return Section(
        anchor="claims", group=paper_item.GROUP, title="The paper's claims", blocks=[introduction, *tables],
        heading="The paper's claims", about=about,
    )  # fmt: skip


def _row(record: Record, verdict: Verdict, anchors: dict[int, str], archive: Archive) -> Row:
    bounds, claim = verdict.interval, verdict.claim
    weights, tokens = verdicts.size(verdicts.Evidence(record, archive.by_identity).records)
    label = Markup('<a href="#{}">{}</a> {}').format(anchors[id(record)], paper_item.item_title(record), claim.says)
    cells = (
        Cell(verdict.word, css=f"verdict {verdict.word}"),
        Cell(verdicts.ratio_text(verdict.ours)),
        Cell(f"{verdicts.ratio_text(bounds.low)} to {verdicts.ratio_text(bounds.high)}" if bounds else "—"),
        Cell(verdicts.ratio_text(verdict.paper)),
        Cell(f"{claim.relation} {claim.threshold:g}"),
        Cell(verdict.why, css="why"),
        Cell(weights),
        Cell(tokens),
    )
    return label, "", cells
