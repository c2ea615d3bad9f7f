"""The paper's numbers, typed again from its tables; the figures agree with the tables that they draw."""

import pytest

from alibi_lab.report.published import PUBLISHED


def _at(item: str, label: str, column: str, **place: float) -> float | None:
    series = PUBLISHED[item].series[label]
    if not place:
        (value,) = series[column]
        return value
    ((name, key),) = place.items()
    return dict(zip(series[name], series[column], strict=True))[key]


def test_every_item_of_the_paper_is_there() -> None:
    assert list(PUBLISHED) == [f"figure-{n}" for n in range(1, 12)] + [f"table-{n}" for n in range(1, 16)]


@pytest.mark.parametrize(
    ("item", "label", "column", "place", "value"),
    [
        ("table-1", "T5 Bias, L = 3072", "evaluation_tokens_per_second", {}, 4900),
        ("table-1", "Rotary, L = 1024", "memory_bytes", {}, 22.8e9),
        ("table-2", "ALiBi, L = 512", "perplexity", {"length": 15512}, 18.31),
        ("table-2", "T5 Bias, L = 512", "perplexity", {"length": 15512}, None),
        ("table-2", "Sinusoidal, L = 512", "perplexity", {"length": 532}, 19.91),
        ("table-2", "Sinusoidal, L = 512", "tokens_per_second", {"length": 512}, 15046),
        ("table-3", "Rotary, L = 1024", "perplexity", {"length": 16024}, 106.99),
        ("table-4", "T5 Bias, L = 3072", "perplexity", {"length": 6072}, 17.68),
        ("table-5", "ALiBi, L = 512", "perplexity", {"length": 3072}, 18.40),
        ("table-5", "Sinusoidal, L = L_valid", "perplexity", {"length": 64}, 28.03),
        ("table-5", "Rotary, L = L_valid", "perplexity", {"length": 1024}, 19.33),
        ("table-6", "ALiBi, L = 512, L_valid = 3072", "test_perplexity", {}, 19.08),
        ("table-6", "T5 Bias, L = 3072", "evaluation_tokens_per_second", {}, 7300),
        ("table-7", "ALiBi, L = 3072, L_valid = 3072", "test_perplexity", {}, 17.66),
        ("table-7", "Compressive Transformer (Rae et al., 2020)", "parameters", {}, 329e6),
        ("table-8", "ALiBi, L = 1024", "perplexity", {"length": 3072}, 13.52),
        ("table-9", "ALiBi, L = 512, L_valid = 3072", "test_perplexity", {}, 10.98),
        ("table-10", "Staged Training (Press et al., 2021)", "test_perplexity", {}, 10.48),
        ("table-11", "ALiBi, L = 1024", "perplexity_2048", {}, 8.92),
        ("table-11", "Sinusoidal, L = 2048", "updates", {}, 44200),
        ("table-12", "ALiBi, L = 512", "perplexity_2048", {}, 9.54),
        ("table-12", "Sinusoidal, L = 1024", "perplexity_512", {}, None),
        ("table-13", "Sinusoidal, L = 1024", "perplexity", {"length": 3072}, 393.71),
        ("table-14", "T5 Bias, L = 512", "perplexity", {"length": 1536}, 20.36),
        ("table-15", "ALiBi, L = 1024", "perplexity", {"length": 1024}, 17.46),
    ],
)
def test_numbers_are_the_papers(item: str, label: str, column: str, place: dict[str, float], value: float) -> None:
    assert _at(item, label, column, **place) == value


@pytest.mark.parametrize(
    ("item", "series", "numbers"),
    [
        ("table-1", 12, 36),
        ("table-2", 4, 2 * (4 * 35 - 3)),  # T5 bias has no number at three lengths
        ("table-3", 4, 2 * (4 * 35 - 4)),
        ("table-4", 4, 2 * (4 * 33 - 3)),
        ("table-5", 11, 36 + 8 + 3 + 3),
        ("table-6", 5, 25),
        ("table-7", 13, 12 + 8 + 13),
        ("table-8", 4, 9),
        ("table-9", 3, 9),
        ("table-10", 7, 20),
        ("table-11", 4, 16),
        ("table-12", 6, 18 + 12),
        ("table-13", 3, 10),
        ("table-14", 3, 10),
        ("table-15", 3, 10),
    ],
)
def test_no_row_is_missing(item: str, series: int, numbers: int) -> None:
    found = PUBLISHED[item].series
    assert len(found) == series
    columns = [(name, values) for columns in found.values() for name, values in columns.items() if name != "length"]
    assert sum(value is not None for _, values in columns for value in values) == numbers


def test_a_figure_draws_the_numbers_of_its_table() -> None:
    assert _at("figure-1", "ALiBi, L = 1024", "perplexity", length=16024) == 17.98
    for figure, table in (("figure-4", "table-5"), ("figure-9", "table-8"), ("figure-11", "table-15")):
        for label in set(PUBLISHED[figure].series) & set(PUBLISHED[table].series):
            for length in PUBLISHED[figure].series[label]["length"]:
                there = _at(table, label, "perplexity", length=length)
                assert _at(figure, label, "perplexity", length=length) == there
    assert PUBLISHED["figure-2"].series == PUBLISHED["table-1"].series
    assert _at("figure-6", "ALiBi, L = 512", "perplexity", length=1024) == 9.3
    assert _at("figure-8", "ALiBi, L = 512", "train_tokens_per_second") == 28300
    assert _at("figure-8", "Sinusoidal, L = 3072", "perplexity") == 18.67
