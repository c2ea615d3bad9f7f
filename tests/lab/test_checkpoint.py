"""A checkpoint is whole or not there, and what is wrong with one is said in a sentence."""

import json
import math
import shutil

import pytest
import torch
from damaged_json import DAMAGED

from alibi_attn.lab import checkpoint
from alibi_attn.lab.checkpoint import CheckpointError, load_checkpoint, load_checkpoint_tokenizer, load_progress, newest
from alibi_attn.lab.data import load_corpus
from alibi_attn.lab.positions import METHODS
from alibi_attn.lab.train import train


@pytest.fixture(scope="module")
def trained_once(run_on, verses, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = run_on(verses(folder), steps=2)
    train(config, load_corpus(config.data), folder / "run")
    return folder / "run", config


@pytest.fixture
def trained(trained_once, tmp_path):
    """A run's folder, to be damaged, and its config."""
    return shutil.copytree(trained_once[0], tmp_path / "run"), trained_once[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_model_is_the_one_that_was_trained(tiny_run, tmp_path, method):
    config = tiny_run(method, steps=2)
    train(config, load_corpus(config.data), tmp_path / "run")
    model, loaded = load_checkpoint(tmp_path / "run")
    again, _ = load_checkpoint(tmp_path / "run" / "step-00000002")
    assert loaded == config
    assert not model.training
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens), again(tokens))


def test_only_the_newest_step_is_kept_and_no_resuming_state_once_finished(trained):
    folder, _ = trained
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert sorted(path.name for path in (folder / "step-00000002").iterdir()) == names


def test_no_checkpoint_is_said_so(tmp_path):
    assert newest(tmp_path / "absent") is None
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="holds no checkpoint; pass a folder below checkpoints/"):
            load_checkpoint(path)


def test_another_schema_is_refused(trained):
    path = newest(trained[0]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(CheckpointError, match="has schema 99 but this version reads 2"):
        load_checkpoint(trained[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is damaged or incomplete"),
        ("config.json", b"\xff", "config.json is damaged or incomplete"),
        ("config.json", b"[]", "has no schema"),
        ("config.json", b'{"schema": 2, "config": {}, "progress": {}}', "config.json is damaged or incomplete"),
        ("model.safetensors", b"", "model.safetensors is damaged or incomplete"),
        ("model.safetensors", b"\x10" * 200, "model.safetensors is damaged or incomplete"),
        ("model.safetensors", None, "model.safetensors is damaged or incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_refused(trained, name, content, message):
    path = newest(trained[0]) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(trained[0])


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_json_is_refused_with_its_path_and_the_reason(name, tmp_path):
    content, reason = DAMAGED[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (load_checkpoint, load_checkpoint_tokenizer):
        with pytest.raises(
            CheckpointError, match=rf"{path} is damaged or incomplete \({reason}.*\); delete {tmp_path} and"
        ):
            read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("seconds", "long", "progress.seconds is 'long' but must be a number"),
        ("step", -1, "progress.step is -1 but must be a number, 0 or more"),
        ("step", 1.5, "progress.step is 1.5"),
        ("loss_nats", [], "loss_nats"),
        ("curve", {"step": [1]}, "progress.curve must have the columns step, loss_nats, learning_rate"),
        ("curve", [], "progress.curve must have the columns"),
        (
            "validation",
            {"step": [1], "seconds": [], "nats": [], "tokens": []},
            "must be lists of numbers of one length",
        ),
        ("validation", {"step": ["a"], "seconds": [1], "nats": [1], "tokens": [1]}, "must be lists of numbers"),
        ("surprise", 1, "surprise"),
    ],
)
def test_a_damaged_progress_is_refused(name, value, reason, trained):
    path = newest(trained[0]) / "config.json"
    about = json.loads(path.read_text())
    about["progress"][name] = value
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=rf"{path} is damaged or incomplete \(.*{reason}"):
        load_progress(path.parent, trained[1])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(name, trained):
    path = newest(trained[0]) / name
    path.unlink()
    path.mkdir()
    read = load_checkpoint_tokenizer if name == "tokenizer.json" else load_checkpoint
    with pytest.raises(CheckpointError, match=rf"{name} is damaged or incomplete \(Is a directory\)"):
        read(trained[0])


def test_a_model_that_cannot_be_built_is_refused(trained):
    path = newest(trained[0]) / "config.json"
    about = json.loads(path.read_text())
    about["config"]["model"]["vocab_size"] = 10**15
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"config.json asks for a model that cannot be made here"):
        load_checkpoint(trained[0])


def test_a_validation_that_overflowed_is_kept_as_null(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("alibi_attn.lab.train.validation_nats", lambda *_, **__: (math.nan, 5))
    config = tiny_run(steps=2, validate_every=1)
    train(config, load_corpus(config.data), tmp_path / "run")
    assert load_progress(newest(tmp_path / "run"), config).validation["nats"] == [None, None]


def test_a_cut_off_model_is_refused(trained):
    path = newest(trained[0]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"delete .* and train again"):
        load_checkpoint(trained[0])


def test_a_model_of_another_shape_is_refused(trained):
    path = newest(trained[0]) / "config.json"
    about = json.loads(path.read_text())
    about["config"]["model"]["ffn_dim"] += 1
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load_checkpoint(trained[0])


def test_a_failed_write_leaves_the_older_checkpoint_and_nothing_else(tiny_run, tmp_path, monkeypatch):
    config, folder = tiny_run(steps=20, checkpoint_every=5), tmp_path / "run"
    real = checkpoint.save_file

    def full_disk(tensors, path):
        if "00000010" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(
        CheckpointError, match=r"\(No space left on device\); make room, .* it goes on from step-00000005"
    ):
        train(config, load_corpus(config.data), folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]
    assert load_progress(newest(folder), config).step == 5
