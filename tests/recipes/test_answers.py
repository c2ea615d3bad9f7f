"""What the answers to the paper's items make of several seeds."""

from types import SimpleNamespace

import pytest

from alibi_lab.recipes.paper.answers import by_length, frontier, models, speeds
from alibi_lab.recipes.paper.items import ITEMS


def test_measured_speeds_are_geometric_means_over_seeds():
    """As in the verdicts, whose interval is around this ratio; a table once had the first seed alone."""
    cell = ITEMS["table-1"].cells("smoke")[0]
    found = [SimpleNamespace(metrics={"a_bytes": value, "unknown": None}) for value in (2.0, 8.0)]
    columns = speeds([cell], SimpleNamespace(matching=lambda *_: found))[cell.label]
    assert (columns["a_bytes"], columns["unknown"], columns["seeds"]) == ([4.0], [None], [2])


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        ("table-2", by_length, {"tokens_per_second": [6.0]}),
        ("table-6", models, {"train_tokens_per_second": [4.0], "evaluation_tokens_per_second": [6.0]}),
        ("figure-8", frontier, {"train_tokens_per_second": [4.0], "evaluation_tokens_per_second": [6.0]}),
    ],
)
def test_the_speeds_of_repeated_runs_are_geometric_means(name, form, expected):
    """Tables 2 to 4, 6 and figure 8 once had arithmetic ones, beside verdicts about geometric ones."""
    cell = next(one for one in ITEMS[name].cells("smoke") if one.column in {"perplexity", "valid_perplexity"})
    ways = [f"{way}_{unit}" for way in ("nonoverlapping", "sliding") for unit in ("nats", "tokens")]
    tests = [
        SimpleNamespace(
            config={"corpus": {}},
            metrics={"parameters": 5},
            curves={
                "by_length": {"length": [cell.length], "tokens_per_second": [speed], **{key: [1.0] for key in ways}}
            },
        )
        for speed in (4.0, 9.0)
    ]
    trainings = [SimpleNamespace(metrics={"tokens_per_second": speed}) for speed in (2.0, 8.0)]
    runs = {"training": trainings, "evaluation": tests}
    columns = form([cell], SimpleNamespace(matching=lambda kind, _: runs[kind]))[cell.label]
    assert {column: columns[column] for column in expected} == expected
