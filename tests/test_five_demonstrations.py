"""The example runs, says what it promises, and draws the picture where it is asked to."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "five_demonstrations.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("five_demonstrations", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_demonstrates_five_things(example, capsys, tmp_path):
    example.main(["--length", "12", "--steps", "80", "--png", str(tmp_path / "heads.png")])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d)\.", printed, flags=re.MULTILINE) == ["1", "2", "2", "2", "3", "4", "5"]
    assert "[2, 10, 64] in, [2, 10, 64] out" in printed
    shares = [float(share) for share in re.findall(r"length: ([\d.]+)%", printed)]
    assert len(shares) == 3
    assert min(shares) > 50  # of 6 % by chance, eight times the trained length included
    assert float(re.search(r"by ([\d.e+-]+) at most", printed).group(1)) < 1e-4
    assert "16,384; of its four linear maps: 16,384" in printed
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_without_png_it_draws_nothing_and_says_how(example, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example.main(["--length", "4", "--steps", "1"])
    assert "--png heads.png" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_made_up_text_follows_its_rule(example):
    tokens = example.text(3, 20)
    assert torch.equal(tokens[:, 2:], (tokens[:, 1:-1] + tokens[:, :-2]) % example.VOCABULARY)
