"""The comparison shows what intervals support: the tasks in its table, the shares, and the ranks."""

import html
import math
import re

import pytest
from made_up_records import DOCUMENTS, evaluated

from alibi_lab import records
from alibi_lab.lab.data import tasks
from alibi_lab.records import Record
from alibi_lab.report.page import report_html
from alibi_lab.report.sections import method_comparison as referee
from alibi_lab.report.sections.method_comparison import Task, comparisons
from alibi_lab.report.series import studies


def one_comparison(found: list[Record]) -> list[Task]:
    (tasks,) = comparisons(studies(found))
    return tasks


def paired_seeds(
    method: str, task: str, values: tuple[float, float], *, apart: float = 0.002, **options: float
) -> list[Record]:
    return [
        evaluated(method, task, tuple(value - seed * apart for value in values), seed=seed, **options)
        for seed in (0, 1)
    ]


@pytest.fixture
def four() -> list[Record]:
    """ALiBi keeps a bit and loses recall; rotary loses both and its text; no method copies; "none" learns nothing."""
    return [
        *paired_seeds("alibi", "mqar", (0.99, 0.07)),
        *paired_seeds("rotary", "mqar", (0.98, 0.40)),
        *paired_seeds("none", "mqar", (0.20, 0.06)),
        *paired_seeds("alibi", "flip-flop", (1.0, 0.99)),
        *paired_seeds("rotary", "flip-flop", (1.0, 0.55)),
        *paired_seeds("none", "flip-flop", (0.6, 0.52)),
        *paired_seeds("alibi", "copy", (0.5, 0.02)),
        *paired_seeds("rotary", "copy", (0.7, 0.02)),
        *paired_seeds("alibi", "", (2.0, 1.99), noise=0.01),
        *paired_seeds("rotary", "", (2.1, 3.0), noise=0.01),
    ]


def test_chance_is_what_the_laboratory_says() -> None:
    assert referee.CHANCE == tasks.CHANCE
    assert referee.TITLES.keys() == referee.CHANCE.keys()


def test_texts_come_first_and_tasks_of_one_size_are_one_comparison(four) -> None:
    tasks = one_comparison(four)
    assert [task.name for task in tasks] == ["", "mqar", "copy", "flip-flop"]
    assert {series.method for series in referee.methods(tasks)} == {"none", "rotary", "alibi"}
    other = evaluated("alibi", "mqar", (0.9, 0.9))
    config = {**other.config, "train": {"length": 64, "seed": 0, "steps": 99}}
    longer = records.make("evaluation", other.name, config=config, metrics={}, curves=other.curves)
    assert len(comparisons(studies([*four, longer]))) == 2
    assert comparisons(studies([])) == []


def test_a_task_that_no_method_learned_is_omitted_and_reported(four) -> None:
    tasks = {task.name: task for task in one_comparison(four)}
    assert [referee.is_learned(task) for task in tasks.values()] == [True, True, False, True]
    assert referee.best_at_trained(tasks["copy"]) == ("rotary", pytest.approx(0.699))
    page = html.unescape(report_html(four))
    assert (
        "Left out: copying. No method has 90 % correct answers at the trained length of 64 tokens (the best, rotary, has 70 %)"
        in page
    )
    heat = page[page.index('<table class="heat">') : page.index("Rank by task")]
    assert "associative recall" in heat
    assert "copying" not in heat[: heat.index("</table>")]


def test_an_interval_reflects_the_number_of_documents() -> None:
    (task,) = one_comparison([evaluated("alibi", "mqar", (1.0, 1.0))])
    found = referee.measured(task, "alibi", 64)
    assert found.value == 1.0
    assert found.interval.low == pytest.approx(1 - 3 / DOCUMENTS)
    assert found.interval.high == 1.0
    assert referee.level(found) == "solved"
    (task,) = one_comparison([evaluated("alibi", "mqar", (1.0, 1.0), trials=16)])
    assert referee.level(referee.measured(task, "alibi", 64)) == "open"  # 16 documents: up to 19 %


def test_distant_seeds_leave_a_level_open() -> None:
    far = [evaluated("alibi", "mqar", (share, share), seed=seed) for seed, share in enumerate((1.0, 0.95))]
    (task,) = one_comparison(far)
    found = referee.measured(task, "alibi", 64)
    assert found.interval.low == pytest.approx(0.975 - 12.7062047 * 0.025)  # Student's t with one degree of freedom
    assert referee.level(found) == "open"
    near = [evaluated("alibi", "mqar", (share, share), seed=seed) for seed, share in enumerate((1.0, 0.99))]
    assert referee.level(referee.measured(one_comparison(near)[0], "alibi", 64)) == "solved"


def test_ranks_are_as_wide_as_the_intervals_of_differences() -> None:
    shares = {"alibi": 0.95, "rotary": 0.94, "none": 0.3}
    found = [
        record
        for method, share in shares.items()
        for record in paired_seeds(method, "mqar", (share, share), apart=0.001)
    ]
    (task,) = one_comparison(found)
    places = {method: referee.rank(task, method, 1024) for method in shares}
    # 128 documents cannot resolve a difference of one point.
    assert places == {"alibi": (1, 2), "rotary": (1, 2), "none": (3, 3)}
    assert referee.rank(task, "t5", 1024) is None


def test_the_page_has_a_heat_map_with_numbers_of_every_method_and_says_the_size(four) -> None:
    page = report_html(four)
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index('<section id="r0"') :])))
    assert "weights 0.12 M seeds 2 trained at 64 tokens" in text
    heat = page[page.index('<table class="heat">') :]
    heat = heat[: heat.index("</table>")]
    assert heat.count('<th class="series"') == 3
    assert heat.count("--heat: ") == 3 * 3 * 2
    assert re.search(r'class="best" style="--heat: 0.998">100<small>98 – 100</small>', heat)
    assert "An interval over parts" not in text  # its studies are not drawn a second time
    assert "Rank by task" in text


def test_perplexities_are_compared_part_by_part_of_the_text() -> None:
    """Parts differ by e, equally for both methods, so their ratio is known precisely."""
    (task,) = one_comparison(
        [evaluated("alibi", "", (2.0, 2.0), noise=0.5), evaluated("rotary", "", (2.1, 3.0), noise=0.5)]
    )
    for method, length, ratio in (("alibi", 64, 1.0), ("rotary", 64, math.exp(0.1)), ("rotary", 1024, math.e)):
        found = referee.measured(task, method, length)
        assert (found.value, found.interval.low, found.interval.high) == pytest.approx((ratio,) * 3)


@pytest.mark.parametrize(
    ("drope", "apart", "word"), [(0.6, 0.002, "confirmed"), (0.2, 0.002, "contradicted"), (0.45, 0.1, "open")]
)
def test_a_claim_about_needles_is_decided_by_its_interval(drope: float, apart: float, word: str) -> None:
    alibi = paired_seeds("alibi", "needles", (1.0, 0.4))
    found = [*paired_seeds("drope", "needles", (0.9, drope), apart=apart), *alibi]
    sentence = referee.dropped_beats_alibi(one_comparison(found))
    assert f"(Gelberg et al. 2025): {word}. At 1,024 tokens" in sentence
    assert sentence in html.unescape(report_html(found))
    assert referee.dropped_beats_alibi(one_comparison(alibi)) == ""
