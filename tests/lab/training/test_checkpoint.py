"""A checkpoint is complete or absent, and errors about a checkpoint are one clear sentence."""

import contextlib
import json
import math
import shutil
import signal

import pytest
import small_runs
import torch

from alibi_attn.strict_json import sealed
from alibi_lab.lab.model.positions import METHODS
from alibi_lab.lab.training import checkpoint
from alibi_lab.lab.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_checkpoint_tokenizer,
    load_progress,
    newest,
)


@pytest.fixture(scope="module")
def trained_once(run_on, verses, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = run_on(verses(folder), steps=2)
    small_runs.trained(config, folder / "run")
    return folder / "run", config


@pytest.fixture
def trained(trained_once, tmp_path):
    """A run's folder, to be damaged, and its config."""
    return shutil.copytree(trained_once[0], tmp_path / "run"), trained_once[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_model_is_the_one_that_was_trained(tiny_run, tmp_path, method):
    config = tiny_run(method, steps=2)
    small_runs.trained(config, tmp_path / "run")
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


def test_a_missing_checkpoint_is_reported(tmp_path):
    assert newest(tmp_path / "absent") is None
    for path, found in ((tmp_path, "holds no checkpoint"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(CheckpointError, match=f"{found}; pass a folder below checkpoints/"):
            load_checkpoint(path)


def test_a_model_of_transformers_is_named_with_what_reads_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(CheckpointError, match=r"model of transformers, .*hf\.patch\(model\).* alibi eval-text"):
        load_checkpoint(tmp_path)


def test_another_schema_is_refused(trained):
    path = newest(trained[0]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(CheckpointError, match="has schema 99, but this version reads schema 3"):
        load_checkpoint(trained[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is damaged or incomplete"),
        ("config.json", b"\xff", "config.json is damaged or incomplete"),
        ("config.json", b"[]", "has no schema"),
        ("config.json", b'{"schema": 3, "config": {}, "progress": {}}', "config.json is damaged or incomplete"),
        ("model.safetensors", b"", "model.safetensors is damaged or incomplete .*; delete .* and train again"),
        ("model.safetensors", b"\x10" * 200, "model.safetensors is damaged or incomplete"),
        ("model.safetensors", None, "model.safetensors is damaged or incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_refused(trained, name, content, message):
    path = newest(trained[0]) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(trained[0])


def change(folder, section, **fields):
    """Edits a checkpoint's config.json without updating its hash, as an outside program would."""
    path = newest(folder) / "config.json"
    about = json.loads(path.read_text())
    about[section] |= fields
    path.write_text(json.dumps(about))


@pytest.mark.parametrize("finished", [False, True])
def test_a_loss_changed_in_the_curve_is_refused(tiny_run, tmp_path, finished):
    config = tiny_run(steps=4, log_every=1)

    def interrupt(progress):
        if progress.step == 2 and not finished:
            signal.raise_signal(signal.SIGTERM)

    with contextlib.nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        small_runs.trained(config, tmp_path, on_step=interrupt)
    curve = load_progress(newest(tmp_path), config).curve
    change(tmp_path, "progress", curve={**curve, "loss_nats": [99.0, *curve["loss_nats"][1:]]})
    with pytest.raises(CheckpointError, match=r"config.json is damaged or incomplete \(is not what was written\)"):
        small_runs.trained(config, tmp_path)


def test_a_checkpoint_of_the_schema_before_is_read(trained):
    path = newest(trained[0]) / "config.json"
    about = json.loads(path.read_text())
    about |= {"schema": 2, "sha256": {name: file["sha256"] for name, file in about.pop("files").items()}}
    path.write_text(json.dumps(about))
    assert load_progress(path.parent, trained[1]).step == trained[1].train.steps
    assert load_checkpoint(trained[0])[1] == trained[1]
    load_checkpoint_tokenizer(trained[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 10**12}, "config.json asks for a model that cannot be made here"),
        ({"ffn_dim": 25}, "model.safetensors is damaged"),
    ],
)
def test_a_model_that_cannot_be_built_or_has_another_shape_is_refused(trained, fields, message):
    path = newest(trained[0]) / "config.json"
    about = json.loads(path.read_text())
    about["config"]["model"] |= fields
    del about["sha256"]
    path.write_bytes(sealed(about))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(trained[0])


def test_a_validation_that_overflowed_is_kept_as_null(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("alibi_lab.lab.training.train.validation_nats", lambda *_, **__: (math.nan, 5))
    config = tiny_run(steps=2, validate_every=1)
    small_runs.trained(config, tmp_path / "run")
    assert load_progress(newest(tmp_path / "run"), config).validation["nats"] == [None, None]


def test_a_full_disk_is_named_even_if_torch_raises_another_error(tiny_run, tmp_path, monkeypatch):
    def full_disk(folder, training):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr(checkpoint, "save_state", full_disk)
    config = tiny_run(steps=20, checkpoint_every=5)
    with pytest.raises(CheckpointError, match=r"\(No space left on device\); make room, .* it begins again"):
        small_runs.trained(config, tmp_path / "run")


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
        small_runs.trained(config, folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]
    assert load_progress(newest(folder), config).step == 5
