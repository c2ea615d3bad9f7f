"""Sentences: the results in words, and the conclusions that a reader may and may not draw from them.

Every number in a sentence is computed from the study. The caveats follow the literature: longer windows have fewer early tokens
(Press et al. 2022, app. B, tables 5 and 15), seeds are few, models are small, and perplexity does not prove memory.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from alibi_attn import units
from alibi_attn.slopes import alibi_slopes
from alibi_lab.report.series import Mode, Series, Study, flat, seed_of

_SMALL_PERCENT = 1.0  # smaller changes count as no change
_MOST_HEADS = 1024  # models with more heads are not drawn


def perplexity(series: Series, length: float, mode: Mode = "nonoverlapping") -> list[float]:
    """exp(mean loss) of each seed at one length; empty if it was not measured."""
    x, y = series.curve("by_length", "length", f"{mode}_nats")
    column = y[:, x == length].ravel()
    return [units.perplexity(float(value)) for value in column if math.isfinite(value)]


def ends(series: Series, mode: Mode = "nonoverlapping") -> tuple[int, int] | None:
    """The trained length (if it was not evaluated, the shortest evaluated length) and the longest evaluated length."""
    x = [int(length) for length in series.curve("by_length", "length", f"{mode}_nats")[0]]
    return (series.trained if series.trained in x else x[0], x[-1]) if x else None


def change_percent(series: Series, mode: Mode = "nonoverlapping") -> float | None:
    """The change of perplexity (mean over seeds) from the trained to the longest evaluated length, in percent."""
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
    """A number with three digits or more: 7.02, 17.2, 1,234."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def question(studies: Sequence[Study]) -> str:
    """The question that the records answer, in words."""
    trained = sorted({length for study in studies for length in study.trained})
    lengths = [length for study in studies for length in study.lengths]
    if not lengths or max(lengths) <= min(trained):
        return "How well do these language models predict text?"
    some = listed([f"{n:,}" for n in trained]) if len(trained) < 4 else f"{trained[0]:,} to {trained[-1]:,}"
    return (
        f"A language model is trained on {some} tokens at a time. Does it still predict well "
        f"when it reads up to {max(lengths):,}?"
    )


def headline(study: Study, *, brief: bool = False) -> str:
    """Which method predicts best at the longest length and, unless `brief`, how the others do."""
    tested = [between[1] for s in study.series if (between := ends(s))]
    if not tested:
        return "These models were trained but are not evaluated yet."
    longest = max(tested)
    ranked = [s for s in study.series if perplexity(s, longest)]
    ranked.sort(key=lambda s: float(np.mean(perplexity(s, longest))))
    trained = f"Trained on {study.trained[0]:,} {study.unit}s at a time and tested on {longest:,}"
    start = trained if len(study.trained) == 1 else f"Tested on {longest:,} {study.unit}s at a time"
    best, *others = ranked
    verb = "predicts best: its perplexity is" if others else "has a perplexity of"
    text = f"{start}, {best.label} {verb} {rounded(np.mean(perplexity(best, longest)))} per {study.unit}{_since(best)}."
    if brief:
        return text
    if others:
        reports = [f"{s.label} {rounded(np.mean(perplexity(s, longest)))}{_since(s, brief=True)}" for s in others]
        since = f"{study.trained[0]:,}" if len(study.trained) == 1 else "its trained length"
        text += f" The other{'s' if others[1:] else ''}, with the change from {since}: {listed(reports)}."
    if others and max(perplexity(best, longest)) >= min(perplexity(others[0], longest)):
        text += f" The seeds of {best.label} and {others[0].label} overlap, so which of the two is better is open."
    return text


def sliding_sentence(study: Study) -> str:
    """The result of the best method with a sliding window, which has few early tokens; "" if it was not measured."""
    ranked = [s for s in study.series if perplexity(s, max(study.lengths, default=0))]
    if not ranked:
        return ""
    best = min(ranked, key=lambda s: float(np.mean(perplexity(s, max(study.lengths)))))
    plain, sliding, between = change_percent(best), change_percent(best, "sliding"), ends(best, "sliding")
    if plain is None or sliding is None or between is None:
        return ""
    first, last = (rounded(np.mean(perplexity(best, length, "sliding"))) for length in between)
    text = (
        f"With a sliding window, which has few early tokens, {best.label} goes from {first} at {between[0]:,} to "
        f"{last} at {between[1]:,} ({signed(sliding)})"
    )
    if sliding < -_SMALL_PERCENT:
        return f"{text}: the longer context itself helps it."
    if plain < -_SMALL_PERCENT:
        return f"{text}: its gain with nonoverlapping windows comes from fewer early tokens, not from longer context."
    return f"{text}: longer context neither helps it much nor hurts it." if sliding <= _SMALL_PERCENT else f"{text}."


def position_sentence(study: Study) -> str:
    """A warning that some points of the loss by position are means of few tokens; "" if that was not recorded."""
    counts = [np.nanmin(y) for s in study.series for _, y in [s.curve("by_position", "position", "tokens")] if y.size]
    if not counts:
        return ""
    return f"Some points are the mean of only {min(counts):,.0f} tokens; nothing is smoothed."


def allowed(study: Study) -> list[str]:
    """The conclusions that a reader may draw."""
    conclusions = [f"What these runs measured: {_where(study)}."]
    differing = _differing(study)
    if differing == ["model.method"]:
        seeds = "and the seeds are the same" if have_equal_seeds(study.series) else "but not all have the same seeds"
        conclusions.append(
            f"The runs compare the position methods: the configurations differ in nothing else, {seeds}."
        )
    elif differing:
        conclusions.append(
            f"The runs differ in {listed(differing)}; a difference between two lines may be due to any of these."
        )
    changes = [(s, change) for s in study.series if (change := change_percent(s)) is not None]
    worse = [s.label for s, change in changes if change > _SMALL_PERCENT]
    steady = [s.label for s, change in changes if change <= _SMALL_PERCENT]
    if worse:
        conclusions.append(f"Beyond the trained length perplexity rises for {listed(worse)}.")
    if steady:
        conclusions.append(
            f"It does not rise for {listed(steady)}."
            if worse
            else f"Perplexity does not rise with length for {listed(steady)}."
        )
    return conclusions


def not_allowed(study: Study) -> list[str]:
    """The conclusions that a reader may not draw, with the numbers that show why."""
    conclusions = [*_early_tokens(study), _seeds(study), _scale(study)]
    heads = head_counts(study)
    if heads and study.lengths:
        flattest, longest = float(alibi_slopes(max(heads)).min()), max(study.lengths)
        conclusions.append(
            f"That ALiBi remembers distant text. Its flattest head subtracts {flattest * longest:.3g} nats from the score of a "
            f"key {longest:,} tokens back; a level curve shows that distant text does no harm, not that it is used."
        )
    for series in study.series:
        between = ends(series)
        if between and study.lengths and between[1] < max(study.lengths):
            conclusions.append(
                f"Anything about {series.label} at lengths above {between[1]:,}: it has no positions beyond {between[1]:,}."
            )
    conclusions.append(
        "How fast a method is elsewhere. Speed and memory were measured with this code on this machine; memory is that of the "
        "whole process."
    )
    return conclusions


def head_counts(study: Study) -> list[int]:
    """The head counts of the models with ALiBi, ascending."""
    counts = (flat(r.config).get("model.num_heads") for s in study.series if s.method == "alibi" for r in s.records)
    found = {heads for heads in counts if isinstance(heads, int) and 1 <= heads <= _MOST_HEADS}
    return sorted(found)


def seed_count(series: Iterable[Series]) -> str:
    """The number of seeds of each series: "2 seeds", or "1 to 3 seeds" if they differ."""
    counts = [s.seeds for s in series]
    low, high = min(counts), max(counts)
    return _counted(low, "seed") if low == high else f"{low:,} to {high:,} seeds"


def have_equal_seeds(series: Iterable[Series]) -> bool:
    """Whether all series have the same seeds."""
    return len({tuple(map(seed_of, s.evaluations or s.trainings)) for s in series}) == 1


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
                f"window of context on average, {between[0] // 2:,} tokens at {between[0]:,} and {between[1] // 2:,} at "
                f"{between[1]:,}, so longer windows are easier for any model that tolerates them (the early token curse). At "
                f"{between[0]:,} tokens {series.label}'s perplexity is {abs(gap):.1f} % {'higher' if gap >= 0 else 'lower'} in "
                "nonoverlapping windows than in sliding ones. Compare the two panels."
            )
            break
    return found


def _seeds(study: Study) -> str:
    if study.seeds == 1:
        return (
            "Which of two close lines is better. There is one seed, so the influence of chance is unknown; the perplexity of "
            "models this small often differs by one or two percent between seeds."
        )
    spreads = (
        float(np.max(np.nanmax(y, axis=0) - np.nanmin(y, axis=0)))
        for s in study.series
        for _, y in [s.curve("by_length", "length", "nonoverlapping_nats")]
        if len(y) > 1
    )
    widest = max(spreads, default=0.0)
    text = f"Which of two lines is better where their bands overlap. There are {study.seeds} seeds"
    if not widest:
        return f"{text}."
    percent = 100 * (units.perplexity(widest) - 1)
    return f"{text}; two seeds of one method differ by up to {widest:.3f} nats, {percent:.1f} % of perplexity."


def _scale(study: Study) -> str:
    parameters = [value for s in study.series for value in s.metric("parameters")]
    size = f" of {max(parameters) / 1e6:.2g} million parameters" if parameters else ""
    return (
        f"That other model sizes, texts or training lengths behave the same. These are models{size} on one corpus; in the paper, "
        "ALiBi's lead within the trained length is clear at 247 million parameters and gone at 1.3 billion."
    )


def _where(study: Study) -> str:
    name = study.corpus.get("name", "one corpus")
    tokens = [value for s in study.series for value in s.metric("tokens")]
    amount = f", {max(tokens):,.0f} training tokens" if tokens else ""
    runs = f"{_counted(len(study.series), 'configuration')}, {seed_count(study.series)} each"
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
        return f", nearly the same as at {between[0]:,} ({before})"
    size = signed(abs(change)).removeprefix("+")
    return f", {size} {'above' if change > 0 else 'below'} the {before} at {between[0]:,}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(parts: Sequence[str]) -> str:
    """The parts as one text: "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
