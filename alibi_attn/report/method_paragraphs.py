"""The words of a referee: one paragraph a method, what it is good for, composed of what its intervals carry.

No sentence is written for a method. Each is the same rule asked of its numbers: solved at both lengths, solved at the trained
one only, not solved there, open; of a text, whether the perplexity of a sliding window rises; and where nobody is better.
"""

import math
from collections.abc import Sequence

from alibi_attn.report import method_comparison as referee
from alibi_attn.report.method_comparison import Measured, Task

STEADY = 1.05  # a perplexity that surely rises by less is no worse at length


def paragraph(tasks: Sequence[Task], method: str) -> str:
    """What the method is good for, as far as the tasks say; each number with its interval."""
    symbols = [task for task in tasks if task.name and referee.scores(task, method, task.lengths[0]).seeds]
    levels = {
        task.name: tuple(referee.level(referee.measured(task, method, at)) for at in task.lengths) for task in symbols
    }
    everywhere = [task for task in symbols if levels[task.name] == ("solved", "solved")]
    only_trained = [task for task in symbols if levels[task.name] == ("solved", "not solved")]
    unlearned = [task for task in symbols if levels[task.name][0] == "not solved"]
    undecided = [task for task in symbols if task not in (*everywhere, *only_trained, *unlearned)]
    unsaid = "Not learned at the trained length, so that nothing is said of longer ones: "
    texts = [task for task in tasks if not task.name and task.series(method)]
    borne = [task for task in texts if (found := referee.change(task, method).interval) and found.high < STEADY]
    good = [
        _sentence("Good at both lengths: ", everywhere, method),
        *(_text(task, method) for task in borne),
        _sentence("Good at the trained length only: ", only_trained, method),
        _unbeaten(tasks, method),
    ]
    rest = [
        *(_text(task, method) for task in texts if task not in borne),
        _sentence(unsaid, unlearned, method, only_first=True),
        _sentence("Open: ", undecided, method),
    ]
    shown = [] if any(good) else ["Nothing here shows what it is good for."]
    return " ".join(part for part in (*good, *shown, *rest) if part)


def number(task: Task, found: Measured) -> str:
    """A share in per cent, a ratio with two decimals; "—" where nothing was measured."""
    return _number(task, found.value)


def between(task: Task, found: Measured) -> str:
    """The interval as "93 – 100"; "" where there is none."""
    bounds = found.interval
    return "" if bounds is None else f"{_number(task, bounds.low)} – {_number(task, bounds.high)}"


def _text(task: Task, method: str) -> str:
    trained, longest = task.lengths
    found = referee.change(task, method)
    if not math.isfinite(found.value):
        return f"On {task.title} it was not tested at {longest:,} tokens."
    ratio = f"{_near_one(found.value)} of that at {trained:,}"
    if found.interval is None:
        return f"On {task.title}, a sliding window of {longest:,} tokens has {ratio}, with no interval, so nothing follows."
    low, high = found.interval.low, found.interval.high
    told = f"{ratio} ({_near_one(low)} to {_near_one(high)})"
    start = f"On {task.title} the perplexity of a sliding window at {longest:,} tokens is {told}: "
    if high < 1:
        return start + "it gains from length."
    if high < STEADY:
        return start + f"it bears length, to {100 * (STEADY - 1):.0f} %."
    if low > 1:
        return start + "it loses by length."
    return start + "whether it bears length is open."


def _sentence(start: str, tasks: Sequence[Task], method: str, *, only_first: bool = False) -> str:
    parts = []
    for task in tasks:
        lengths = task.lengths[:1] if only_first else task.lengths
        found = [referee.measured(task, method, at) for at in lengths]
        told = [f"{_with_interval(task, one)} at {at:,}" for one, at in zip(found, lengths, strict=True)]
        last = found[-1]
        if not only_first and last.interval and last.interval.low <= task.chance:
            told[-1] += ", not told from chance" if last.interval.high >= task.chance else ", below chance"
        parts.append(f"{task.title}: {'; '.join(told)}")
    return f"{start}{' · '.join(parts)}." if parts else ""


def _unbeaten(tasks: Sequence[Task], method: str) -> str:
    """Where nobody is surely better at the longest length, if that tells this method from any other."""
    names = [series.method for series in referee.methods(tasks)]
    found = []
    for task in tasks:
        place = referee.rank(task, method, task.lengths[1], names)
        if place and place[0] == 1 and place[1] < len([name for name in names if task.series(name)]):
            found.append(task.title)
    if not found:
        return ""
    return f"At the longest length no other method is surely better, and some are surely worse, in {_listed(found)}."


def _with_interval(task: Task, found: Measured) -> str:
    unit = "\N{NO-BREAK SPACE}%" if task.name else ""
    bounds = found.interval
    if bounds is None:
        return f"{_number(task, found.value)}{unit}" + (", no interval" if math.isfinite(found.value) else "")
    return f"{_number(task, found.value)}{unit} ({_number(task, bounds.low)} to {_number(task, bounds.high)})"


def _number(task: Task, value: float) -> str:
    if not math.isfinite(value):
        return "—"
    return f"{100 * value:.0f}" if task.name else _ratio(value)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _near_one(value: float) -> str:
    """With a third decimal where two would say 1.00."""
    return f"{value:.3f}" if abs(value - 1) < 0.1 else _ratio(value)


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
