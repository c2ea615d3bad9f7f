"""The bar of a training at 80 columns: count and bar first, the end of the name, and no number before the first step."""

import io
import re

from rich.console import Console

from alibi_lab.lab.progress import progress_shown
from alibi_lab.lab.training.checkpoint import Progress

NAME = "a-long-recipe/a-very-long-position-method-128/seed-11"


def drawn(width: int) -> list[str]:
    """The bar as it is drawn before the first step and after the second, without control sequences."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with progress_shown(console, NAME, 60, 4096, ("model 1 of 4", 10**6)) as show:
        before = len(out.getvalue())
        for step in (1, 2):
            show(Progress(step=step, seconds=step / 10, loss_nats=4.2))
    assert before >= 0
    return [line.strip() for line in re.split(r"\x1b\[[0-9?]*[A-Za-z]|[\r\n]", out.getvalue()) if line.strip()]


def test_a_narrow_terminal_shows_count_bar_loss_and_the_end_of_the_name() -> None:
    lines = drawn(80)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "nan" in line]
    assert lines[0].startswith("0/60 ")
    assert lines[-1].startswith("2/60 ")
    assert "4.200 nats" in lines[-1]
    assert lines[-1].endswith("128/seed-11")


def test_a_wide_terminal_also_shows_speed_and_the_time_of_all_models() -> None:
    last = drawn(200)[-1]
    assert "tokens/s" in last
    assert "min for all models" in last
    assert f"model 1 of 4: {NAME}" in last
