"""Sentences: what the records say in words, and what a reader may and may not conclude from them.

Every number in a sentence is computed from the study. The caveats follow the literature: fewer early tokens in longer
windows (Press et al. 2022, app. B, tables 5 and 15), few seeds, small models, and perplexity as no proof of memory.
"""

import math
from collections.abc import Sequence

import numpy as np

from alibi_attn import units
from alibi_attn.report.series import Mode, Series, Study, flat
from alibi_attn.slopes import alibi_slopes

_SMALL_PERCENT = 1.0  # changes below it are called none
_MOST_HEADS = 1024  # whose pictures a page holds


def perplexity(series: Series, length: float, mode: Mode = "nonoverlapping") -> list[float]:
    """exp(mean loss) of each seed at one length; empty where nothing was measured."""
    x, y = series.curve("by_length", "length", f"{mode}_nats")
    column = y[:, x == length].ravel()
    return [units.perplexity(float(value)) for value in column if math.isfinite(value)]


def ends(series: Series, mode: Mode = "nonoverlapping") -> tuple[int, int] | None:
    """The trained length (the shortest evaluated one, if it was not evaluated) and the longest evaluated one."""
    x = [int(length) for length in series.curve("by_length", "length", f"{mode}_nats")[0]]
    return (series.trained if series.trained in x else x[0], x[-1]) if x else None


def change_percent(series: Series, mode: Mode = "nonoverlapping") -> float | None:
    """By how many per cent perplexity (the mean over seeds) changes from the trained to the longest evaluated length."""
    between = ends(series, mode)
    if between is None or between[0] == between[1]:
        return None
    first, last = (float(np.mean(perplexity(series, length, mode))) for length in between)
    return 100 * (last / first - 1)


def signed(percent: float) -> str:
    """A change with its sign: "+32 %", "−4.7 %"."""
    digits = 0 if abs(percent) >= 10 else 1
    return f"{percent:+,.{digits}f}\N{NO-BREAK SPACE}%".replace("-", "−")


def rounded(value: float | np.floating) -> str:
    """Three digits, for sentences: 7.02, 17.2, 1,234."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def question(studies: Sequence[Study]) -> str:
    """What the records ask."""
    trained = sorted({length for study in studies for length in study.trained})
    lengths = [length for study in studies for length in study.lengths]
    if not lengths or max(lengths) <= min(trained):
        return "How well do these language models predict text?"
    return (
        f"A language model is trained on {_listed([f'{n:,}' for n in trained])} tokens at a time. Does it still predict well "
        f"when it reads up to {max(lengths):,}?"
    )


def headline(study: Study) -> str:
    """The result in one or two sentences: who predicts best at the longest length, and what became of the others."""
    tested = [between[1] for s in study.series if (between := ends(s))]
    if not tested:
        return "These models were trained but not evaluated yet."
    longest = max(tested)
    ranked = [s for s in study.series if perplexity(s, longest)]
    ranked.sort(key=lambda s: float(np.mean(perplexity(s, longest))))
    trained = f"Trained on {study.trained[0]:,} {study.unit}s at a time and tested on {longest:,}"
    start = trained if len(study.trained) == 1 else f"Tested on {longest:,} {study.unit}s at a time"
    best, *others = ranked
    verb = "predicts best: its perplexity is" if others else "has a perplexity of"
    text = f"{start}, {best.label} {verb} {rounded(np.mean(perplexity(best, longest)))} per {study.unit}{_since(best)}."
    if others:
        reports = [f"{s.label} {rounded(np.mean(perplexity(s, longest)))}{_since(s, brief=True)}" for s in others]
        since = f"{study.trained[0]:,}" if len(study.trained) == 1 else "its trained length"
        text += f" The other{'s' if others[1:] else ''}, with the change from {since}: {_listed(reports)}."
    if others and max(perplexity(best, longest)) >= min(perplexity(others[0], longest)):
        text += f" The seeds of {best.label} and {others[0].label} overlap, so which of the two is better is open."
    return text


def sliding_sentence(study: Study) -> str:
    """What of the best curve is left with a sliding window, which takes the early tokens away; "" if it was not measured."""
    ranked = [s for s in study.series if perplexity(s, max(study.lengths, default=0))]
    if not ranked:
        return ""
    best = min(ranked, key=lambda s: float(np.mean(perplexity(s, max(study.lengths)))))
    plain, sliding, between = change_percent(best), change_percent(best, "sliding"), ends(best, "sliding")
    if plain is None or sliding is None or between is None:
        return ""
    first, last = (rounded(np.mean(perplexity(best, length, "sliding"))) for length in between)
    text = (
        f"With a sliding window, which leaves few tokens near a start, {best.label} goes from {first} at {between[0]:,} to "
        f"{last} at {between[1]:,} ({signed(sliding)})"
    )
    if sliding < -_SMALL_PERCENT:
        return f"{text}: the longer context itself helps it."
    if plain < -_SMALL_PERCENT:
        return (
            f"{text}: what it gains with nonoverlapping windows comes from fewer early tokens, not from longer context."
        )
    return f"{text}: longer context neither helps it much nor hurts it." if sliding <= _SMALL_PERCENT else f"{text}."


def position_sentence(study: Study) -> str:
    """How few tokens stand behind a point of the loss by position, where the records say it."""
    counts = [y.min() for s in study.series for _, y in [s.curve("by_position", "position", "tokens")] if y.size]
    if not counts:
        return ""
    return f"Some points, the first above all, are the mean of only {min(counts):,.0f} tokens; nothing is smoothed."


def allowed(study: Study) -> list[str]:
    """What a reader may conclude."""
    said = [f"What came out of these runs: {_where(study)}."]
    differing = _differing(study)
    if differing == ["model.method"]:
        said.append(
            "The comparison is of the position methods: the configurations differ in nothing else, and the seeds are the same."
        )
    elif differing:
        said.append(
            f"The runs differ in {_listed(differing)}; a difference between two lines may come from any of these."
        )
    changes = [(s, change) for s in study.series if (change := change_percent(s)) is not None]
    worse = [s.label for s, change in changes if change > _SMALL_PERCENT]
    steady = [s.label for s, change in changes if change <= _SMALL_PERCENT]
    if worse:
        said.append(f"Beyond the trained length perplexity rises for {_listed(worse)}.")
    if steady:
        said.append(
            f"It does not rise for {_listed(steady)}."
            if worse
            else f"Perplexity does not rise with length for {_listed(steady)}."
        )
    return said


def not_allowed(study: Study) -> list[str]:
    """What a reader may not conclude, each with the numbers that say why."""
    said = [*_early_tokens(study), _seeds(study), _scale(study)]
    heads = head_counts(study)
    if heads and study.lengths:
        flattest, longest = float(alibi_slopes(max(heads)).min()), max(study.lengths)
        said.append(
            f"That ALiBi remembers what is far away. Its flattest head takes {flattest * longest:.3g} nats from a key "
            f"{longest:,} tokens back; a level curve shows that far text does no harm, not that it is used."
        )
    for series in study.series:
        between = ends(series)
        if between and study.lengths and between[1] < max(study.lengths):
            said.append(
                f"Anything about {series.label} at lengths above {between[1]:,}: it has no positions beyond {between[1]:,}."
            )
    said.append(
        "How fast a method is elsewhere. Speed and memory are of this code on this machine, memory of the whole process."
    )
    return said


def head_counts(study: Study) -> list[int]:
    """The head counts of the models with ALiBi, ascending."""
    counts = (flat(r.config).get("model.num_heads") for s in study.series if s.method == "alibi" for r in s.records)
    found = {heads for heads in counts if isinstance(heads, int) and 1 <= heads <= _MOST_HEADS}
    return sorted(found)


def _early_tokens(study: Study) -> list[str]:
    found = []
    for series in sorted(study.series, key=lambda s: s.method != "alibi"):
        between = ends(series)
        windows, sliding = (
            (perplexity(series, between[0], mode) for mode in ("nonoverlapping", "sliding")) if between else ([], [])
        )
        if between and between[1] > between[0] and windows and sliding:
            gap = 100 * (float(np.mean(windows)) / float(np.mean(sliding)) - 1)
            found.append(
                "That a curve which falls with length shows use of longer context. In nonoverlapping windows a token has half a "
                f"window before it on average, {between[0] // 2:,} tokens at {between[0]:,} and {between[1] // 2:,} at "
                f"{between[1]:,}, so longer windows are easier for any model that bears them (the early token curse). At "
                f"{between[0]:,} tokens {series.label}'s perplexity is {abs(gap):.1f} % {'higher' if gap >= 0 else 'lower'} in "
                "nonoverlapping windows than in sliding ones. Compare the two panels."
            )
            break
    return found


def _seeds(study: Study) -> str:
    if study.seeds == 1:
        return (
            "Which of two close lines is better. There is one seed, so nothing shows how much chance does; models this small "
            "often differ by one or two per cent of perplexity from seed to seed."
        )
    spreads = [
        np.ptp(y, axis=0).max()
        for s in study.series
        for _, y in [s.curve("by_length", "length", "nonoverlapping_nats")]
        if len(y) > 1
    ]
    widest = float(np.nanmax(spreads)) if spreads else 0.0
    return (
        f"Which of two lines is better where their bands meet. There are {study.seeds} seeds; two seeds of one method are up to "
        f"{widest:.3f} nats apart, {100 * math.expm1(widest):.1f} % of perplexity."
    )


def _scale(study: Study) -> str:
    parameters = [value for s in study.series for value in s.metric("parameters")]
    size = f" of {max(parameters) / 1e6:.2g} million parameters" if parameters else ""
    return (
        f"That other sizes, texts or lengths of training behave alike. These are models{size} on one corpus; in the paper the "
        "lead of ALiBi within the trained length is clear at 247 million parameters and gone at 1.3 billion."
    )


def _where(study: Study) -> str:
    name = study.corpus.get("name", "one corpus")
    tokens = [value for s in study.series for value in s.metric("tokens")]
    amount = f", {max(tokens):,.0f} training tokens" if tokens else ""
    runs = f"{_counted(len(study.series), 'configuration')}, {_counted(study.seeds, 'seed')} each"
    return f"{runs}, on {name}{amount}"


def _differing(study: Study) -> list[str]:
    configs = [flat(s.records[0].config) for s in study.series]
    names = sorted({name for config in configs for name in config if name.startswith(("model.", "data.", "train."))})
    return [n for n in names if n != "train.seed" and len({repr(config.get(n)) for config in configs}) > 1]


def _since(series: Series, *, brief: bool = False) -> str:
    between, change = ends(series), change_percent(series)
    if between is None or change is None:
        return ""
    if brief:
        return f" ({signed(change)})"
    before = rounded(np.mean(perplexity(series, between[0])))
    if abs(change) < _SMALL_PERCENT:
        return f", nearly what it is at {between[0]:,} ({before})"
    return f", {abs(change):.0f} % {'above' if change > 0 else 'below'} the {before} at {between[0]:,}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
