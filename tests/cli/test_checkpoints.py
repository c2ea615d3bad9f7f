"""RUN:MODEL names one model of a run's folder."""

from pathlib import Path

import pytest

from alibi_lab.cli.checkpoints import find


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for model in ("alibi-128", "rotary-128"):
        step = tmp_path / "run" / "checkpoints" / "quick" / model / "seed-0-a1b2" / "step-00000002"
        step.mkdir(parents=True)
        (step / "config.json").write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["alibi", "alibi-128", "alibi-128/seed-0"])
def test_a_model_is_found_by_any_of_its_names(run: Path, name: str) -> None:
    assert find(Path(f"{run}:{name}")) == run / "checkpoints" / "quick" / "alibi-128" / "seed-0-a1b2"


def test_a_typo_gets_a_suggestion_and_the_choices(run: Path) -> None:
    choices = f"pass one of: {run}:alibi-128/seed-0; {run}:rotary-128/seed-0"
    for name, guess in (("alib", " (did you mean 'alibi'?)"), ("t5", "")):
        with pytest.raises(ValueError) as caught:
            find(Path(f"{run}:{name}"))
        assert str(caught.value) == f"{run}:{name} has no such models{guess}; {choices}"
    with pytest.raises(ValueError, match="has 2 such models; pass one of"):
        find(run)
