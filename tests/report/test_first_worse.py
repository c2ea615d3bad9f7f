"""A method fails at the first length whose whole interval is worse than at the trained length."""

import pytest

from alibi_lab import records
from alibi_lab.records import Record
from alibi_lab.report.intervals import first_worse
from alibi_lab.report.series import studies
from alibi_lab.report.tables.study import changes


def rotary(nats: dict[int, float], noise: float | None) -> Record:
    """Losses by length of a model trained at 64; by part they are alternately above and below the mean by `noise`."""
    by_part = [(at, part % 2 * 2 - 1) for at in nats for part in range(16)]
    curves = {"by_length": {"length": list(nats), "nonoverlapping_nats": list(nats.values())}}
    if noise is not None:
        curves["by_part"] = {
            "length": [at for at, _ in by_part],
            "tokens": [256] * len(by_part),
            "nonoverlapping_nats": [nats[at] + noise * sign * (at > 64) for at, sign in by_part],
        }
    config = {"model": {"method": "rotary"}, "train": {"length": 64, "seed": 0}, "eval": {"lengths": list(nats)}}
    return records.make("evaluation", "made-up/rotary/0", config=config, metrics={}, curves=curves)


@pytest.mark.parametrize(
    ("nats", "found"),
    [
        ({64: 4.0, 96: 3.9, 128: 4.01, 192: 4.2, 256: 4.5}, (128, 192)),  # at 128 the interval over text includes 0
        ({64: 4.0, 96: 4.2, 128: 3.9, 192: 4.2}, (64, 96)),
        ({64: 4.0, 96: 3.9, 128: 3.8}, (128, None)),
    ],
)
def test_a_method_fails_where_the_whole_interval_is_worse(
    nats: dict[int, float], found: tuple[int, int | None]
) -> None:
    (study,) = studies([rotary(nats, noise=0.05)])
    assert first_worse(study.series[0], "nonoverlapping") == found
    ((_, _, cells),) = changes(study).blocks[0].rows
    assert cells[3].spread == (f"from {found[1]}" if found[1] else "")
    (study,) = studies([rotary(nats, noise=None)])
    assert first_worse(study.series[0], "nonoverlapping") is None


def test_a_change_to_almost_nothing_is_all_of_the_perplexity() -> None:
    (study,) = studies([rotary({64: 2000.0, 256: 4.0}, noise=0.05)])
    ((_, _, cells),) = changes(study).blocks[0].rows
    assert [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in cells[3:5]] == ["−100 %", "−100 % to −100 %"]
