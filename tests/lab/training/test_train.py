"""The training loop learns, can be interrupted anywhere, and stops when nothing is left to train."""

import dataclasses
import itertools
import json
import shutil
import signal

import pytest
import torch
from small_runs import trained

from alibi_lab.lab.config import ConfigError, EvalConfig
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.evaluation.evaluate import mean_nats, nonoverlapping, scored_stretches
from alibi_lab.lab.training import train as loop
from alibi_lab.lab.training.checkpoint import CheckpointError, load_checkpoint, load_progress, newest
from alibi_lab.lab.training.interruption import SIGNALS
from alibi_lab.lab.training.parallel import prepare, share_of_batch
from alibi_lab.lab.training.train import TrainingError, steps


class PowerCut(Exception):
    """An exception that no code expects."""


def cut_at(step, stop=signal.SIGINT):
    """Raises the error after that step, or sends the signal, which takes effect when the current step is done."""

    def on_step(progress):
        if progress.step == step:
            if isinstance(stop, Exception):
                raise stop
            signal.raise_signal(stop)

    return on_step


def dropped(config):
    """Adds dropout everywhere, so that random numbers matter."""
    shares = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **shares))


def weights(folder):
    return load_checkpoint(folder)[0].state_dict()


@pytest.mark.parametrize("method", ["alibi", "t5"])
@pytest.mark.parametrize(
    ("cut", "stop", "raised", "left"),
    [
        (10, signal.SIGINT, KeyboardInterrupt, "step-00000011"),
        (4, signal.SIGTERM, KeyboardInterrupt, "step-00000005"),
        (13, PowerCut(), PowerCut, "step-00000007"),
    ],
)
def test_a_resumed_training_is_the_uncut_one_bit_for_bit(tiny_run, tmp_path, method, cut, stop, raised, left):
    config = tiny_run(method)
    uncut = trained(config, tmp_path / "uncut")
    with pytest.raises(raised):
        trained(config, tmp_path / "cut", on_step=cut_at(cut, stop))
    assert newest(tmp_path / "cut").name == left
    resumed = trained(config, tmp_path / "cut")
    assert resumed.curve == uncut.curve
    assert resumed.curve["step"] == list(range(1, 21))
    expected, found = weights(tmp_path / "uncut"), weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_steps_equal_the_training_and_continue_beyond_its_end(tiny_run, tmp_path):
    config = tiny_run(steps=4)
    corpus = load_corpus(config.data)
    training = prepare(config)
    taken = list(itertools.islice(steps(training, corpus), 5))
    assert [step.number for step in taken] == [1, 2, 3, 4, 5]
    assert [step.loss_nats for step in taken[:4]] == trained(config, tmp_path).curve["loss_nats"]
    assert all(step.gradient_norm > 0 for step in taken)
    next(steps(training, corpus, start=2))
    assert training.model.progress == 3 / 4


@pytest.mark.parametrize("cut", [3, 4])
def test_a_signal_during_the_last_step_or_its_checkpoint_is_not_lost(tiny_run, tmp_path, cut):
    config = tiny_run(steps=4)
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path, on_step=cut_at(cut))
    assert trained(config, tmp_path, on_step=cut_at(1, PowerCut())).step == 4  # finished, not trained again


def test_a_batch_in_parts_is_the_same_batch_up_to_rounding(tiny_run, tmp_path):
    whole, parts = (tiny_run("kerple", steps=10, accumulate=accumulate) for accumulate in (1, 4))
    trained(whole, tmp_path / "whole")
    trained(parts, tmp_path / "parts")
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in expected:  # ten steps of AdamW, which divides by the gradient's size, spread roundings of 1e-7
        assert torch.allclose(expected[name], found[name], rtol=1e-3, atol=1e-4), name
    losses = [
        load_progress(newest(tmp_path / name), config).curve["loss_nats"]
        for name, config in (("whole", whole), ("parts", parts))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("cut", [3, 10])
def test_dropout_and_staged_lengths_resume_bit_for_bit(tiny_run, tmp_path, cut):
    config = dropped(tiny_run(first_length=8, first_steps=6, validate_every=4, validate_tokens=64))
    uncut = trained(config, tmp_path / "uncut")
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "cut", on_step=cut_at(cut))
    torch.rand(1)  # random numbers that other code draws in between change nothing
    resumed = trained(config, tmp_path / "cut")
    assert resumed.curve == uncut.curve
    assert resumed.validation["nats"] == uncut.validation["nats"]
    assert uncut.validation["step"] == [4, 8, 12, 16, 20]
    assert uncut.validation["tokens"] == [64] * 5
    undropped = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    assert trained(undropped, tmp_path / "undropped").curve != uncut.curve


def test_training_draws_none_of_the_caller_s_random_numbers(tiny_run, tmp_path):
    config = dropped(tiny_run(steps=2))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(config, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_stages_read_batches_of_their_length(tiny_run, tmp_path, monkeypatch):
    shapes = []
    real = loop._step

    def seen(training, parts, *arguments):
        shapes.append(tuple(parts[0].columns[0].shape))
        return real(training, parts, *arguments)

    monkeypatch.setattr(loop, "_step", seen)
    config = tiny_run(steps=5, first_length=8, first_steps=3)
    trained(config, tmp_path)
    assert shapes == [(8, 9)] * 3 + [(4, 17)] * 2


def test_a_validation_is_the_test_of_the_weights_as_they_are(tiny_run, tmp_path):
    config = tiny_run(steps=6, validate_every=6, validate_length=32, validate_tokens=96)
    corpus = load_corpus(config.data)
    progress = trained(config, tmp_path)
    stretches = scored_stretches(len(corpus.valid), 32, 96)
    losses = nonoverlapping(load_checkpoint(tmp_path)[0], corpus.valid, stretches, length=32, batch_tokens=96)
    assert progress.validation["nats"] == pytest.approx([mean_nats(losses)], rel=1e-6)


def test_a_checkpoint_of_another_config_is_refused(tiny_run, tmp_path):
    config = tiny_run(steps=2)
    trained(config, tmp_path)
    with pytest.raises(CheckpointError, match=r"was trained with train.seed = 0, not 1; pass another folder"):
        trained(tiny_run(steps=2, seed=1), tmp_path)
    other_test = dataclasses.replace(config, eval=EvalConfig(lengths=(8,)))
    assert trained(other_test, tmp_path, on_step=cut_at(1, PowerCut())).step == 2


def test_a_batch_that_cannot_be_shared_is_refused():
    class Three:
        num_processes, process_index = 3, 1

    with pytest.raises(ConfigError, match=r"4 examples .* but 3 processes share it equally; .* that 48 divides"):
        share_of_batch(Three(), 1, (16,), 64)
    with pytest.raises(ConfigError, match=r"4 examples .* 3 processes in 2 parts each .* that 96 divides"):
        share_of_batch(Three(), 1, (16,), 64, 2)


def test_a_training_that_is_killed_again_and_again_ends_as_the_uncut_one(tiny_run, run_program, tmp_path):
    config = dropped(tiny_run(steps=40, checkpoint_every=1, validate_every=5, validate_tokens=64))
    told = json.loads(run_program("killed_training.py", tmp_path, config).stdout)
    assert len(told["ends"]) > 16
    assert told["ends"] == [-signal.SIGKILL] * (len(told["ends"]) - 1) + [0]
    assert told["steps"] == sorted(told["steps"])
    uncut, cut = (load_progress(newest(tmp_path / name), config) for name in ("uncut", "cut"))
    assert cut.curve == uncut.curve
    assert cut.validation["nats"] == uncut.validation["nats"]
    expected, found = weights(tmp_path / "uncut"), weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["step-00000040"]


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_of_nan_stops_training_and_keeps_the_last_good_checkpoint(tiny_run, tmp_path):
    config = tiny_run(steps=50, learning_rate=1e30, clip_norm=1e30, checkpoint_every=1)
    with pytest.raises(TrainingError, match=r"at step \d+ the loss is .* lower train.learning_rate"):
        trained(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_damaged_state_is_refused(tiny_run, tmp_path):
    config = tiny_run()
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path / "run", on_step=cut_at(10))
    for name in ("state/optimizer.pt", "model.safetensors"):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(tmp_path / "run", copy)
        (newest(copy) / name).write_bytes(b"not a state")
        with pytest.raises(CheckpointError, match=rf"{name} is damaged or incomplete .* delete .* and train again"):
            trained(config, copy)
    shutil.rmtree(newest(tmp_path / "run") / "state")
    with pytest.raises(CheckpointError, match=r"optimizer.pt is damaged or incomplete"):
        trained(config, tmp_path / "run")


def test_signals_mean_what_they_meant_before_once_training_is_over(tiny_run, tmp_path):
    before = [signal.getsignal(number) for number in SIGNALS]
    config = tiny_run(steps=2)
    trained(config, tmp_path)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_text_that_repeats_is_learned(tiny_run, tmp_path):
    config = tiny_run(steps=150, batch_tokens=512, learning_rate=1e-2)
    progress = trained(config, tmp_path)
    assert progress.curve["loss_nats"][0] > 4
    assert progress.loss_nats < 1.5
