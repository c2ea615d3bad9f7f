"""Fixtures of the lab's tests: a model that runs in milliseconds, and a text that a model can learn."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alibi_lab.lab.config import DataConfig, EvalConfig, Method, ModelConfig, RunConfig, TrainConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.model.language_model import LanguageModel

PROCESSES = Path(__file__).parents[1] / "support" / "processes"
TRAINED_LENGTH = 16


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., LanguageModel]:
    def make(method: Method, *, seed: int = 0, **fields: object) -> LanguageModel:
        asked = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "embed_dim": 16, "ffn_dim": 24, **fields}
        config = ModelConfig(method=method, **asked)
        return LanguageModel(config, trained_length=TRAINED_LENGTH, seed=seed).eval()

    return make


@pytest.fixture(scope="session")
def verses() -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "text" / "verses.txt"
        path.parent.mkdir()
        lines = (f"{number} bottles of beer on the wall, {number} bottles of beer.\n" for number in range(400))
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def text_file(tmp_path, verses):
    return verses(tmp_path)


@pytest.fixture(scope="session")
def run_on() -> Callable[..., RunConfig]:
    def make(text: Path, method: Method = "alibi", **train: object) -> RunConfig:
        asked = {
            "length": 16,
            "steps": 20,
            "batch_tokens": 64,
            "warmup_steps": 2,
            "log_every": 1,
            "checkpoint_every": 7,
        }
        return RunConfig(
            model=ModelConfig(method=method, num_layers=1, num_heads=2, embed_dim=16, ffn_dim=24),
            data=DataConfig(text=(str(text),), valid_share=0.2),
            train=TrainConfig(**{**asked, **train}),
            eval=EvalConfig(lengths=(16, 32), tokens=64, batch_tokens=64),
        )

    return make


@pytest.fixture(scope="session")
def run_program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of support/processes, which reads a folder and a config, with options of Python."""

    def run(name: str, folder: Path, config: RunConfig, *python: str) -> subprocess.CompletedProcess[str]:
        (folder / "config.json").write_text(json.dumps(to_json(config)))
        program = [sys.executable, *python, PROCESSES / name, folder, folder / "config.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=280)
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def tiny_run(text_file, run_on) -> Callable[..., RunConfig]:
    return functools.partial(run_on, text_file)
