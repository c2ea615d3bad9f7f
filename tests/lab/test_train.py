"""The loop learns, can be cut anywhere, and stops when there is nothing left to learn from."""

import itertools
import math
import shutil
import signal

import pytest
import torch

from alibi_attn.lab.checkpoint import CheckpointError, load_checkpoint, newest
from alibi_attn.lab.config import TrainConfig
from alibi_attn.lab.data import load_corpus
from alibi_attn.lab.train import TrainingError, learning_rate, train


class PowerCut(Exception):
    """Something that no code expects."""


def cut_at(step, error=None):
    """After that step: the error, or Ctrl-C, which is answered when the step that it falls into is done."""

    def on_step(progress):
        if progress.step == step:
            if error:
                raise error
            signal.raise_signal(signal.SIGINT)

    return on_step


def weights(folder):
    return load_checkpoint(folder)[0].state_dict()


@pytest.mark.parametrize("method", ["alibi", "t5"])
@pytest.mark.parametrize(
    ("cut", "error", "raised", "left"),
    [(10, None, KeyboardInterrupt, "step-00000011"), (13, PowerCut(), PowerCut, "step-00000007")],
)
def test_a_resumed_training_is_the_uncut_one_bit_for_bit(tiny_run, tmp_path, method, cut, error, raised, left):
    config = tiny_run(method)
    corpus = load_corpus(config.data)
    uncut = train(config, corpus, tmp_path / "uncut")
    with pytest.raises(raised):
        train(config, corpus, tmp_path / "cut", on_step=cut_at(cut, error))
    assert newest(tmp_path / "cut").name == left
    resumed = train(config, corpus, tmp_path / "cut")
    assert resumed.curve == uncut.curve
    assert resumed.curve["step"] == list(range(1, 21))
    expected, found = weights(tmp_path / "uncut"), weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_finished_training_is_not_trained_again(tiny_run, tmp_path):
    config = tiny_run(steps=3)
    corpus = load_corpus(config.data)
    progress = train(config, corpus, tmp_path)
    assert train(config, corpus, tmp_path, on_step=cut_at(1, PowerCut())) == progress


def test_ctrl_c_means_what_it_meant_before_once_training_is_over(tiny_run, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    config = tiny_run(steps=2)
    train(config, load_corpus(config.data), tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_text_that_repeats_is_learned(tiny_run, tmp_path):
    config = tiny_run(steps=150, batch_tokens=512, learning_rate=1e-2)
    progress = train(config, load_corpus(config.data), tmp_path)
    assert progress.curve["loss_nats"][0] > 4
    assert progress.loss_nats < 1.5


def test_the_same_seed_is_the_same_training(tiny_run, tmp_path):
    config = tiny_run(steps=4)
    corpus = load_corpus(config.data)
    curves = [
        train(tiny_run(steps=4, seed=seed), corpus, tmp_path / name).curve
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert curves[0] == curves[1] != curves[2]


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_no_number_stops_the_training_and_keeps_the_last_good_checkpoint(tiny_run, tmp_path):
    config = tiny_run(steps=50, learning_rate=1e30, clip_norm=1e30, checkpoint_every=1)
    with pytest.raises(TrainingError, match=r"at step \d+ the loss is .* lower train.learning_rate"):
        train(config, load_corpus(config.data), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_damaged_state_is_refused(tiny_run, tmp_path):
    config = tiny_run()
    corpus = load_corpus(config.data)
    with pytest.raises(KeyboardInterrupt):
        train(config, corpus, tmp_path / "run", on_step=cut_at(10))
    for name in ("state/optimizer.pt", "model.safetensors"):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(tmp_path / "run", copy)
        (newest(copy) / name).write_bytes(b"not a state")
        with pytest.raises(CheckpointError, match=rf"{name} is damaged or incomplete .* delete .* and train again"):
            train(config, corpus, copy)
    shutil.rmtree(newest(tmp_path / "run") / "state")
    with pytest.raises(CheckpointError, match=r"optimizer.pt is damaged or incomplete"):
        train(config, corpus, tmp_path / "run")


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    config = TrainConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[110] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert math.isclose(learning_rate(0, TrainConfig(warmup_steps=0, learning_rate=1.0)), 1.0)
