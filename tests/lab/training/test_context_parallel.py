"""Two processes that share every sequence train like one, stop when one of them dies, and resume."""

import json

import pytest
import torch

from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.config_io import override
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.model.attention import attend
from alibi_lab.lab.model.position_method import ByDistance, Context, Pass
from alibi_lab.lab.training.train import train


@pytest.fixture(scope="module")
def told(tmp_path_factory, verses, run_on, run_program):
    folder = tmp_path_factory.mktemp("context")
    config = run_on(
        verses(folder),
        length=50,
        batch_tokens=200,
        steps=8,
        accumulate=2,
        activation_checkpointing=True,
        validate_every=4,
        validate_tokens=100,
        checkpoint_every=3,
        context_parallel=2,
        exchange_timeout_s=30.0,
    )
    result = run_program("context_training.py", folder, config, "-W", "error")
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", ["alibi", "alibi-fox", "rotary", "fsdp"])
def test_two_processes_of_context_train_like_one(told, method):
    """Includes gates, whose sums cross ranks, and rotary, in which every token needs all earlier ones."""
    assert told[f"{method} codes"] == [0, 0]
    for ours, alone in zip(told[method], told[f"{method} alone"], strict=True):
        assert len(ours) == len(alone) > 0
        assert ours == pytest.approx(alone, abs=1e-5)
    assert told[method][0][-1] < told[method][0][0]


def test_a_process_that_is_killed_ends_the_other_within_the_time_limit(told):
    assert told["killed"] == [3, -9]
    assert told["killed_s"] < 60
    assert any(word in told["told"] for word in ("could not exchange", "closed", "reset", "Timed out", "timed out"))


def test_a_killed_training_resumes_with_the_same_losses(told):
    assert told["step"] == 3
    assert told["resumed"] == [0, 0]
    assert told["cut"][0] == told["alibi"][0]


def test_processes_that_cannot_share_a_sequence_get_an_error(text_file, run_on, tmp_path):
    config = run_on(text_file, context_parallel=2)
    with pytest.raises(ConfigError, match="context_parallel is 2 but there are 1 processes"):
        train(config, load_corpus(config.data), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"train\.context_parallel is 0"):
        override(config, {"train.context_parallel": "0"})
    with pytest.raises(ConfigError, match=r"exchange_timeout_s is 0\.0"):
        override(config, {"train.exchange_timeout_s": "0"})


@pytest.mark.parametrize("bias", [torch.zeros(2, 5, 5), ByDistance(torch.zeros(2, 5))])
def test_a_bias_for_every_pair_of_tokens_is_refused(bias):
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ConfigError, match="a bias per pair of tokens"):
        attend(q, q, q, bias, Pass(5, 5, context=Context(None, 0, 1.0)))
