"""What the biases of ALiBi look like, once for every number of heads in the records."""

from markupsafe import Markup

from alibi_attn.report import sentences
from alibi_attn.report.plots import bias
from alibi_attn.report.plots.drawing import Plot
from alibi_attn.report.section import Archive, Group, Numbers, Section, Text, pictures
from alibi_attn.report.tables.heads import head_rows
from alibi_attn.report.tables.table import text_table

_COLUMNS = ("head", Markup("slope <i>m</i>"), "half-life, tokens", "under 10⁻⁶ from")


def find(archive: Archive) -> list[tuple[int, int]]:
    """(number of heads, the longest length at which they were trained or tested)."""
    longest: dict[int, int] = {}
    for study in archive.studies:
        for count in sentences.head_counts(study):
            longest[count] = max([longest.get(count, 1), *study.lengths, *study.trained])
    return sorted(longest.items())


def draw(heads: tuple[int, int], number: int, archive: Archive) -> Section:
    """The bias and the factor of every head, and the slopes in a table."""
    count, length = heads
    text = Markup(
        "Each head subtracts its slope <i>m</i> times the distance from the score of a key. That is all ALiBi adds, with no "
        "parameters: a large slope sees only what is near, a small one sees far."
    )
    drawn = [
        Plot(
            "The bias of each head",
            f"Queries go down and keys to the right, {length:,} each. Full color is no penalty; it has faded out where a "
            "key's factor is one in a million.",
            bias.bias_grid(count, length),
            f"The causal biases of {count} heads over {length:,} tokens: from a thin diagonal to a full triangle.",
        ),
        Plot(
            "How fast each head forgets",
            "The factor that the bias gives a key. Dots mark the half-life, with the slope.",
            bias.factor_curves(count, length),
            f"The factor that each of {count} heads leaves a key, by distance: steep heads forget within a few tokens.",
        ),
    ]
    grid, factors = pictures(drawn, f"heads{count}")
    table = Numbers(text_table(_COLUMNS, head_rows(count)), label="Slopes")
    several = f": {count}" if len(find(archive)) > 1 else ""
    return Section(
        anchor=f"heads{count}", group="", title="", heading=f"The heads of ALiBi{several}",
        blocks=[Text(text), Group("panels heads", [Group("", [grid, table]), factors])],
    )  # fmt: skip
