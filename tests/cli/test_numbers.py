"""Numbers and paths that make no sense end a command at once, with one sentence; commands of the documents are valid."""

import os
from pathlib import Path

import pytest
from commands import alibi

from alibi_attn.cli.console import check_writable
from alibi_attn.cli.explain import explain
from alibi_attn.files import replace_file
from alibi_lab.lab.config import ConfigError, ModelConfig, TrainConfig
from alibi_lab.lab.model.generation import generate
from alibi_lab.lab.model.language_model import LanguageModel

HUGE = str(10**22)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--dry-run", "--seeds", HUGE],
        ["run", "--dry-run", "--seeds", "9" * 5000],
        ["run", "--dry-run", "--set", f"train.seed={HUGE}"],
        ["run", "--dry-run", "--set", f"model.vocab_size={HUGE}"],
        ["run", "--dry-run", "--shard", f"0/{'9' * 5000}"],
        ["generate", "none", "--prompt", "a", "--seed", HUGE],
        ["explain", "--seed", HUGE],
        ["explain", "--length", HUGE, "--ranks", "2"],
        ["explain", "--heads", HUGE, "--ranks", "2"],
    ],
)
def test_huge_integers_are_wrong_usage(arguments: list[str]) -> None:
    assert "long long" not in alibi(*arguments, code=2)


@pytest.mark.parametrize("ranks", [99_999_999, 10**22, 725])
def test_a_table_of_too_many_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"--ranks is {ranks} with 8 key/value heads, but at most 4194304 numbers"):
        explain(ranks=ranks)


@pytest.mark.parametrize(
    "wrong", [{"temperature": float("nan")}, {"temperature": 1e-300}, {"seed": 2**63}, {"seed": -1}]
)
def test_sampling_refuses_what_torch_cannot_compute(wrong: dict[str, float]) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "ffn_dim": 16}
    model = LanguageModel(ModelConfig(method="alibi", **sizes), trained_length=16)
    assert len(list(generate(model, [1], max_new_tokens=2, temperature=1e-6, seed=2**63 - 1))) == 2
    with pytest.raises(ValueError, match="temperature of 0, or 1e-06 or more"):
        generate(model, [1], max_new_tokens=2, **wrong)


def test_the_largest_seed_works() -> None:
    assert TrainConfig(seed=10**12).seed * 1_000_003 < 2**63
    with pytest.raises(ConfigError, match=f"must be 0 or more, and at most {10**12}"):
        TrainConfig(seed=10**12 + 1)


def test_a_pipe_is_no_file_to_write(tmp_path: Path) -> None:
    """Renaming a finished file over a device or a pipe would replace it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is a device or a pipe; pass the name of a file"):
        check_writable(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device or a pipe"):
        check_writable(Path(os.devnull))
    check_writable(tmp_path / "file")
    with pytest.raises(FileExistsError, match="pipe is not a regular file"):
        replace_file(tmp_path / "pipe", b"")
    assert (tmp_path / "pipe").is_fifo()
