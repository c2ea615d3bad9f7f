"""A new position method is a class and a row of a table: then it trains, is tested and is drawn."""

import html
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.lab import experiment
from alibi_attn.lab.config import ConfigError, ModelConfig
from alibi_attn.lab.fields import override
from alibi_attn.lab.hooks import Pass, PositionMethod
from alibi_attn.lab.positions import METHODS
from alibi_attn.position_methods import METHODS as LOOKS
from alibi_attn.position_methods import Look
from alibi_attn.recipes.methods import RECIPE
from alibi_attn.report.page import report_html


class NearestFirst(PositionMethod):
    """−d²/1000: a bias that no method here has."""

    def bias(self, at: Pass) -> Tensor | None:
        distance = torch.arange(at.key_len)[-at.query_len :, None] - torch.arange(at.key_len)
        return (-(distance**2) / 1000.0).masked_fill(distance < 0, -float("inf")).expand(2, -1, -1)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "made-up", NearestFirst)
    monkeypatch.setitem(LOOKS, "made-up", Look("a made-up method", "#123456", "#abcdef", "4"))


def test_every_method_has_a_class_and_a_row() -> None:
    assert list(METHODS) == list(LOOKS)


def test_without_its_row_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.method is 'made-up'.*pass one of none, sinusoidal"):
        ModelConfig(method="made-up")


@pytest.mark.usefixtures("made_up")
def test_a_method_of_two_files_trains_is_tested_and_is_drawn(tmp_path: Path) -> None:
    (run,) = (run for run in RECIPE.runs("smoke") if run.model.method == "made-up")
    assert override(run, {"model.method": "made-up"}) == run
    recipe = type(RECIPE)(**{**vars(RECIPE), "runs": lambda scale: (run,)})
    paths = experiment.run(recipe, out=tmp_path, scale="smoke")
    found = [records.load(path) for path in paths]
    assert [record.kind for record in found] == ["training", "evaluation"]
    assert all(nats > 0 for nats in found[1].curves["by_length"]["nonoverlapping_nats"])
    page = report_html(found)
    assert "--made-up: #123456;" in page
    assert "--made-up: #abcdef;" in page
    assert "stroke: var(--made-up)" in page
    readings = re.findall(r"<title>a made-up method: [\d.,]+ at (\d+)</title>", page)
    assert {"16", "64"} <= set(readings)
    assert "a made-up method predicts" in html.unescape(
        page
    ) or "a made-up method has a perplexity of" in html.unescape(page)
