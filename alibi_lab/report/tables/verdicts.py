"""Verdicts in words: the fixed text of each reason, counts, and ratios, for the page and the terminal.

`reasons.json` explains the contradictions of our own results, by scale and claim; it is written by hand.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from alibi_lab.report.intervals import Interval, Word
from alibi_lab.report.verdicts import Verdict

CONTRADICTED_BECAUSE: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).parents[1].joinpath("reasons.json").read_text(encoding="utf-8")
)


def counted(judged: Sequence[Verdict]) -> str:
    """The number of claims by verdict: "1 contradicted, 2 confirmed, 3 open"."""
    counts = {word: sum(verdict.word == word for verdict in judged) for word in get_args(Word)}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def why(verdict: Verdict) -> str:
    """The reason for a verdict."""
    reason = _reason(verdict)
    return f"{reason}; {verdict.aged}" if verdict.aged else reason


def because(verdict: Verdict, scale: str) -> str:
    """Our explanation of a contradiction at this scale; "" if there is none."""
    return CONTRADICTED_BECAUSE.get(scale, {}).get(verdict.claim.says, "") if verdict.word == "contradicted" else ""


def _reason(verdict: Verdict) -> str:
    bounds, pairs = verdict.interval, verdict.pairs
    if pairs is None:
        return "exact, by definition" if bounds else "not measured at this size"
    single = len(pairs.logs) == 1
    if bounds is None:
        return f"no interval: {'one seed, and ' if single else ''}{pairs.why_not or 'a loss is not finite'}"
    if verdict.claim.about_training and verdict.seeds is None:
        return f"one training of each, but a claim about training needs two seeds (the interval is over {bounds.over} only)"
    includes = ": the interval includes the threshold" if verdict.word == "open" else ""
    return f"over {bounds.over}{', one training' if single else ''}{includes}"


def ratio_text(value: float) -> str:
    """A ratio with four digits; "—" for NaN."""
    if not math.isfinite(value):
        return "—"
    return f"{value:.4f}" if value < 2 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def interval_text(bounds: Interval | None) -> str:
    """The ends of an interval of a ratio; "—" if there is none."""
    return f"{ratio_text(bounds.low)} to {ratio_text(bounds.high)}" if bounds else "—"
