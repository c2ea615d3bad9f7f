"""An experiment trains and evaluates only what is missing, and writes one record of each."""

import dataclasses
import json
import re
import shutil
import signal

import pytest
import torch
from rich.console import Console
from small_runs import recipe_of

from alibi_lab import records
from alibi_lab.lab import experiment
from alibi_lab.lab import run as one_run
from alibi_lab.lab.config import ConfigError, DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.data.corpus import CorpusError, load_corpus
from alibi_lab.lab.data.tasks import TaskError
from alibi_lab.lab.experiment import ExperimentError, run
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.training import train as loop
from alibi_lab.lab.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_checkpoint_tokenizer,
    load_progress,
    newest,
)
from alibi_lab.lab.training.train import batches, train


@pytest.fixture
def recipe(tiny_run):
    return recipe_of(*(tiny_run(method, steps=8) for method in ("alibi", "learned")))


def trainings(monkeypatch):
    """The names of all trainings from here on."""
    seen, real = [], one_run.train

    def counted(config, *arguments, **named):
        seen.append((config.model.method, config.train.seed))
        return real(config, *arguments, **named)

    monkeypatch.setattr(one_run, "train", counted)
    return seen


def test_every_run_leaves_a_training_and_an_evaluation(recipe, tmp_path):
    paths = run(recipe, out=tmp_path / "out")
    found = [records.load(path) for path in paths]
    assert [(record.kind, record.name) for record in found] == [
        ("training", "tiny/alibi-16/seed-0"),
        ("evaluation", "tiny/alibi-16/seed-0"),
        ("training", "tiny/learned-16/seed-0"),
        ("evaluation", "tiny/learned-16/seed-0"),
    ]
    training, evaluation, _, learned = found
    assert set(training.config) == {"model", "data", "train", "corpus"}
    assert set(evaluation.config) == {"model", "data", "train", "eval", "corpus"}
    assert training.metrics["tokens"] == 8 * 64
    assert training.metrics["parameters"] == evaluation.metrics["parameters"]
    assert training.metrics["loss_nats"] == training.curves["training"]["loss_nats"][-1]
    assert len(training.curves["training"]["step"]) == 8
    assert evaluation.curves["by_length"]["length"] == [16, 32]
    assert learned.curves["by_length"]["sliding_nats"][1] is None
    assert sorted(path.name for path in (tmp_path / "out" / "records").iterdir()) == sorted(path.name for path in paths)


def test_a_lost_evaluation_without_its_checkpoint_trains_again_and_keeps_the_record(recipe, tmp_path):
    first = run(recipe, out=tmp_path)
    kept = first[0].read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    expected = records.load(first[1]).curves["by_length"]["nonoverlapping_nats"]
    first[1].unlink()
    assert run(recipe, out=tmp_path) == first
    assert first[0].read_bytes() == kept
    assert records.load(first[1]).curves["by_length"]["nonoverlapping_nats"] == expected


def test_an_interrupted_experiment_resumes_where_it_stopped(recipe, tmp_path, monkeypatch):
    uncut = [records.load(path) for path in run(recipe, out=tmp_path / "uncut")]
    real = one_run.train

    def interrupted(config, corpus, folder, *, on_step):
        def press(progress):
            on_step(progress)
            if config.model.method == "learned" and progress.step == 3:
                signal.raise_signal(signal.SIGINT)

        return real(config, corpus, folder, on_step=press)

    with monkeypatch.context() as patched:
        patched.setattr(one_run, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, out=tmp_path / "cut")
    assert len(list((tmp_path / "cut" / "records").iterdir())) == 2
    seen = trainings(monkeypatch)
    resumed = [records.load(path) for path in run(recipe, out=tmp_path / "cut")]
    assert seen == [("learned", 0)]
    for mine, theirs in zip(resumed, uncut, strict=True):
        assert mine.config == theirs.config
        assert mine.metrics.get("loss_nats") == theirs.metrics.get("loss_nats")
        for column in ("nonoverlapping_nats", "sliding_nats"):
            assert mine.curves.get("by_length", {}).get(column) == theirs.curves.get("by_length", {}).get(column)


def test_seeds_repeat_every_run(recipe, tmp_path):
    names = [records.load(path).name for path in run(recipe, out=tmp_path, seeds=(1, 2))]
    assert names[::2] == [f"tiny/{method}-16/seed-{seed}" for seed in (1, 2) for method in ("alibi", "learned")]


def test_a_folder_that_cannot_be_written_is_reported(recipe, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExperimentError, match=r"cannot be written .*; pass a folder that you may write"):
            run(recipe, out=out)


def test_errors_are_reported_before_anything_is_written(recipe, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"did you mean 'train.steps'"):
        run(recipe, out=out, overrides={"train.stepz": "1"})
    with pytest.raises(ConfigError, match="'t5' has only none; yarn is for rotary"):
        run(recipe, out=out, overrides={"model.method": "t5", "eval.stretch": "yarn"})
    with pytest.raises(ConfigError, match="'learned', whose positions count from the start of a row"):
        run(recipe, out=out, overrides={"model.method": "learned", "data.segments": "true"})
    with pytest.raises(CorpusError, match="one evaluation window of 100000"):
        run(recipe, out=out, overrides={"eval.lengths": "100000"})
    with pytest.raises(CorpusError, match="one training example has 100001"):
        run(recipe, out=out, overrides={"train.length": "100000", "train.batch_tokens": "100000"})
    first, second = recipe.runs("smoke")
    mixed = recipe_of(first, dataclasses.replace(second, train=dataclasses.replace(second.train, precision="bf16")))
    with pytest.raises(ConfigError, match=r"must share train.precision"):
        run(mixed, out=out)
    assert not any((out / name).exists() for name in ("records", "checkpoints"))


@pytest.mark.parametrize("others", [False, True])
def test_an_experiment_that_cannot_begin_removes_the_folders_that_it_made(tiny_run, tmp_path, monkeypatch, others):
    config = dataclasses.replace(tiny_run(), data=DataConfig(corpus="task:passkey:9"))
    another = tmp_path / "new" / "runs" / "another" / "records"

    def load(*arguments):
        if others:  # another experiment begins at the same time
            another.mkdir(parents=True)
        return load_corpus(*arguments)

    monkeypatch.setattr(experiment, "load_corpus", load)
    with pytest.raises(TaskError, match="passkey has no room in 8 tokens"):
        run(recipe_of(config), out=tmp_path / "new" / "runs" / "mine")
    assert not (tmp_path / "new" / "runs" / "mine").exists()
    assert (tmp_path / "new").exists() == another.exists() == others


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_the_console_that_is_passed(recipe, tmp_path, capsys, terminal):
    console = Console(record=True, width=120, force_terminal=terminal)
    run(recipe, out=tmp_path, console=console)
    shown = console.export_text()
    assert re.search(r"tiny/alibi-16/seed-0.*tokens/s", shown)
    named = "" if terminal else "\ntiny/learned-16/seed-0:"
    assert re.search(rf"{named}  nats per token 16: \d\.\d+  32: –  \(\d+ s\)\n", shown)  # learned positions end there
    capsys.readouterr()
    run(recipe, out=tmp_path)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, verses, run_program):
    """The results of two gloo processes, with DDP and with FSDP."""
    folder = tmp_path_factory.mktemp("two")
    more = {"accumulate": 2, "activation_checkpointing": True, "validate_every": 4, "validate_tokens": 64}
    config = RunConfig(
        model=ModelConfig(method="kerple", num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24),
        data=DataConfig(text=(str(verses(folder)),), valid_share=0.2),
        train=TrainConfig(length=16, steps=8, batch_tokens=64, warmup_steps=2, log_every=1, **more),
        eval=EvalConfig(lengths=(16, 32), tokens=64, batch_tokens=64),
    )
    result = run_program("two_processes.py", folder, config, "-W", "error")
    assert "Warning" not in result.stderr, result.stderr
    one = train(config, load_corpus(config.data), folder / "one")
    return folder, config, json.loads(result.stdout), one


def test_two_processes_train_like_one(two_processes):
    """They share every batch and average gradients; the order of sums differs, so losses agree up to rounding."""
    folder, config, told, one = two_processes
    assert told["world_size"] == 2
    two = next(records.find(folder / "ddp" / "records", kind="training"))
    assert {name: two.config[name] for name in ("model", "data", "train")} == {
        name: to_json(config)[name] for name in ("model", "data", "train")
    }
    assert two.curves["training"]["loss_nats"] == pytest.approx(one.curve["loss_nats"], rel=1e-5)
    assert two.curves["validation"]["nats"] == pytest.approx(one.validation["nats"], rel=1e-5)


def test_two_processes_with_a_half_of_every_weight_train_like_one(two_processes):
    folder, config, told, one = two_processes
    assert told["parameters"] == [True] * len(list(load_checkpoint(folder / "one")[0].parameters()))  # DTensors
    assert told["share"] == 0.5
    sharded = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp"))
    progress = load_progress(newest(folder / "uncut"), sharded)
    assert progress.curve["loss_nats"] == pytest.approx(one.curve["loss_nats"], rel=1e-5)
    assert progress.validation["nats"] == pytest.approx(one.validation["nats"], rel=1e-5)
    whole, ours = (load_checkpoint(folder / name)[0].state_dict() for name in ("one", "uncut"))
    assert whole.keys() == ours.keys()
    for name in whole:
        assert torch.allclose(whole[name], ours[name], rtol=1e-3, atol=1e-4), name


def test_shards_resume_bit_for_bit(two_processes):
    folder, config, told, _ = two_processes
    assert told["state"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    sharded = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp"))
    uncut, cut = (load_progress(newest(folder / name), sharded) for name in ("uncut", "cut"))
    assert cut.curve == uncut.curve
    expected, found = (load_checkpoint(folder / name)[0].state_dict() for name in ("uncut", "cut"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_half_precision_is_not_sharded(tiny_run, tmp_path):
    config = tiny_run(parallel="fsdp", precision="fp16")
    with pytest.raises(ConfigError, match=r"pass train.precision bf16 or no"):
        train(config, load_corpus(config.data), tmp_path)


def test_runs_that_differ_in_their_test_share_one_training(tiny_run, tmp_path, monkeypatch):
    config = tiny_run(steps=4)
    tests = tuple(
        dataclasses.replace(config, eval=dataclasses.replace(config.eval, lengths=lengths))
        for lengths in ((16,), (16, 32))
    )
    steps = []
    real = loop._step
    monkeypatch.setattr(loop, "_step", lambda *arguments: steps.append(1) or real(*arguments))
    for name in ("first", "second"):  # recipes of one study, in one folder
        paths = run(recipe_of(*tests, name=name, study="books"), out=tmp_path)
        assert len(steps) == 4
        assert paths[0] == paths[2]
        assert len(set(paths)) == 3
        assert records.load(paths[0]).name == "books/alibi-16/seed-0"
    assert len(list((tmp_path / "checkpoints" / "books" / "alibi-16").iterdir())) == 1


def test_a_vocabulary_that_is_too_small_is_refused_with_the_one_to_pass(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"model.vocab_size is 100 but 'bytes' made 256 .* pass model.vocab_size=256"):
        run(recipe, out=tmp_path, overrides={"model.vocab_size": "100"})
    assert not (tmp_path / "records").exists()


def test_the_test_text_is_tested_on_request(recipe, tmp_path):
    with pytest.raises(CorpusError, match=r"has no test text; pass data.test_share"):
        run(recipe, out=tmp_path, overrides={"eval.split": "test"})
    changes = {"model.method": "alibi", "data.test_share": "0.3"}
    valid, test = (
        records.load(run(recipe, out=tmp_path, overrides={**changes, "eval.split": split})[1])
        for split in ("valid", "test")
    )
    assert valid.curves["by_length"]["nonoverlapping_nats"] != test.curves["by_length"]["nonoverlapping_nats"]
    assert test.config["corpus"]["test_tokens"] > 0


def test_a_model_of_words_takes_its_tokenizer_with_it(recipe, tmp_path):
    changes = {"model.method": "alibi", "data.tokenizer": "words", "model.vocab_size": "500"}
    run(recipe, out=tmp_path, overrides=changes)
    folder = next((tmp_path / "checkpoints" / "tiny" / "alibi-16").iterdir())
    tokenizer = load_checkpoint_tokenizer(folder)
    assert tokenizer.name == "words"
    assert tokenizer.decode(tokenizer.encode("bottles of beer")).decode().split() == ["bottles", "of", "beer"]
    path = newest(folder) / "tokenizer.json"
    path.write_text(path.read_text().replace("beer", "wine"))
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged or incomplete .*; delete"):
        load_checkpoint_tokenizer(folder)


def test_attention_within_documents_counts_targets_of_the_same_document_only(tiny_run, tmp_path):
    """Compared with the same weights' loss, summed per document with a loop over rows and positions."""
    config = tiny_run(steps=1, accumulate=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, segments=True))
    loaded = load_corpus(config.data)
    starts = torch.arange(0, len(loaded.train), 11)
    corpus = dataclasses.replace(loaded, starts={**loaded.starts, "train": starts})
    progress = train(config, corpus, tmp_path)
    model = LanguageModel(config.model, trained_length=16)
    rows, documents = next(batches(corpus.train, starts, length=16, batch_size=4, seed=0))
    losses = []
    for row, belonging in zip(rows, documents, strict=True):
        for document in belonging.unique():
            text = row[belonging == document]
            if len(text) > 1:
                losses += model(text[None, :-1], targets=text[None, 1:])[0].tolist()
    assert progress.loss_nats == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_tracking_shows_every_point_of_the_curves_in_tensorboard(recipe, tmp_path):
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is an extra, track"
    )
    changes = {"model.method": "alibi", "train.validate_every": "4", "train.validate_tokens": "64"}
    training = records.load(run(recipe, out=tmp_path, overrides=changes, track="tensorboard")[0])
    seen = accumulators.EventAccumulator(str(tmp_path / "tensorboard" / "tiny" / "alibi-16" / "seed-0"))
    seen.Reload()
    for name, column in (("training", "loss_nats"), ("training", "learning_rate"), ("validation", "nats")):
        points = seen.Scalars(f"{name}/{column}")
        assert [point.step for point in points] == training.curves[name]["step"]
        assert [point.value for point in points] == pytest.approx(training.curves[name][column])


def test_tracking_without_tensorboard_says_what_to_install(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=r'pip install "\.\[track\]"'):
        run(recipe, out=tmp_path, track="tensorboard")
