"""One paragraph per position method: the tasks that it solves, and its perplexity on longer text.

The same rules produce every paragraph: tasks solved at both lengths, solved at the trained length only, not solved there, or
open; for a text, whether the perplexity with a sliding window rises with length; and the tasks on which no method is
significantly better.
"""

import math
from collections.abc import Sequence

from alibi_lab.report import method_comparison as referee
from alibi_lab.report.method_comparison import Measured, Task
from alibi_lab.report.sentences import listed

STEADY = 1.05  # a perplexity whose whole interval rises by less counts as no worse at length


def paragraph(tasks: Sequence[Task], method: str) -> str:
    """A summary of the method's results on these tasks; each number has its interval."""
    symbols = [task for task in tasks if task.name and referee.scores(task, method, task.lengths[0]).seeds]
    levels = {
        task.name: tuple(referee.level(referee.measured(task, method, at)) for at in task.lengths) for task in symbols
    }
    everywhere = [task for task in symbols if levels[task.name] == ("solved", "solved")]
    only_trained = [task for task in symbols if levels[task.name] == ("solved", "not solved")]
    unlearned = [task for task in symbols if levels[task.name][0] == "not solved"]
    undecided = [task for task in symbols if task not in (*everywhere, *only_trained, *unlearned)]
    not_learned = "Not learned at the trained length, so longer lengths say nothing: "
    texts = [task for task in tasks if not task.name and task.series(method)]
    tolerated = [task for task in texts if (found := referee.change(task, method).interval) and found.high < STEADY]
    good = [
        _sentence("Good at both lengths: ", everywhere, method),
        *(_text(task, method) for task in tolerated),
        _sentence("Good at the trained length only: ", only_trained, method),
        _unbeaten(tasks, method),
    ]
    rest = [
        *(_text(task, method) for task in texts if task not in tolerated),
        _sentence(not_learned, unlearned, method, only_first=True),
        _sentence("Open: ", undecided, method),
    ]
    nothing = [] if any(good) else ["These results do not show what it is good for."]
    return " ".join(part for part in (*good, *nothing, *rest) if part)


def headline(tasks: Sequence[Task]) -> str:
    """Which methods tolerate longer texts, and which solve each task at the longest length, in two sentences."""
    trained, longest = tasks[0].lengths
    names = {series.method: series.label for series in referee.methods(tasks)}
    texts, solved, unsolved = list[str](), list[str](), list[str]()
    for task in tasks:
        if task.name:
            levels = {method: referee.level(referee.measured(task, method, longest)) for method in names}
            found = [names[method] for method, level in levels.items() if level == "solved"]
            (solved if found else unsolved).append(f"{task.title} ({listed(found)})" if found else task.title)
        else:
            bounds = {method: referee.change(task, method).interval for method in names}
            steady = [names[method] for method, bound in bounds.items() if bound and bound.high < STEADY]
            texts.append(f"on {task.title}, the perplexity of {listed(steady) if steady else 'no method'} stays level")
    parts = [
        *texts,
        f"solved: {listed(solved)}" if solved else "",
        f"no method is shown to solve {listed(unsolved)}" if unsolved else "",
    ]
    return f"Trained at {trained:,} tokens and tested at {longest:,}: {'; '.join(filter(None, parts))}."


def number(task: Task, found: Measured) -> str:
    """A share in percent, a ratio with two decimals; "—" if it was not measured."""
    return _number(task, found.value)


def between(task: Task, found: Measured) -> str:
    """The interval as "93 – 100"; "" if there is none."""
    bounds = found.interval
    return "" if bounds is None else f"{_number(task, bounds.low)} – {_number(task, bounds.high)}"


def _text(task: Task, method: str) -> str:
    trained, longest = task.lengths
    found = referee.change(task, method)
    if not math.isfinite(found.value):
        return f"On {task.title}, it was not tested at {longest:,} tokens."
    ratio = f"{_near_one(found.value)} of that at {trained:,}"
    if found.interval is None:
        start = f"On {task.title}, the perplexity with a sliding window at {longest:,} tokens is {ratio}"
        return f"{start}; it has no interval, so nothing follows."
    low, high = found.interval.low, found.interval.high
    bounded = f"{ratio} ({_near_one(low)} to {_near_one(high)})"
    start = f"On {task.title}, the perplexity with a sliding window at {longest:,} tokens is {bounded}: "
    if high < 1:
        return start + "it gains from longer inputs."
    if high < STEADY:
        return start + f"it tolerates longer inputs, to within {100 * (STEADY - 1):.0f} %."
    if low > 1:
        return start + "it gets worse on longer inputs."
    return start + "whether it tolerates longer inputs is open."


def _sentence(start: str, tasks: Sequence[Task], method: str, *, only_first: bool = False) -> str:
    parts = []
    for task in tasks:
        lengths = task.lengths[:1] if only_first else task.lengths
        found = [referee.measured(task, method, at) for at in lengths]
        scores = [f"{_with_interval(task, one)} at {at:,}" for one, at in zip(found, lengths, strict=True)]
        last = found[-1]
        if not only_first and last.interval and last.interval.low <= task.chance:
            scores[-1] += ", not distinguishable from chance" if last.interval.high >= task.chance else ", below chance"
        parts.append(f"{task.title}: {'; '.join(scores)}")
    return f"{start}{' · '.join(parts)}." if parts else ""


def _unbeaten(tasks: Sequence[Task], method: str) -> str:
    """The tasks on which no method is significantly better at the longest length, if another one is significantly worse there."""
    names = [series.method for series in referee.methods(tasks)]
    found = []
    for task in tasks:
        place = referee.rank(task, method, task.lengths[1], names)
        if place and place[0] == 1 and place[1] < len([name for name in names if task.series(name)]):
            found.append(task.title)
    if not found:
        return ""
    return (
        f"At the longest length, no method is significantly better and some are significantly worse on {listed(found)}."
    )


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
    """A ratio, with a third decimal if it is close to 1."""
    return f"{value:.3f}" if abs(value - 1) < 0.1 else _ratio(value)
