"""Fields are set by name and parsed by type; an error for an unknown name or value lists the valid ones."""

import pytest

from alibi_lab.lab.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from alibi_lab.lab.config_io import from_json, override, to_json


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.steps", "50", 50),
        ("train.learning_rate", "1e-4", 1e-4),
        ("train.precision", "bf16", "bf16"),
        ("model.method", "t5", "t5"),
        ("eval.lengths", "128, 256", (128, 256)),
        ("eval.stride", "1", 1),
        ("eval.stride", "none", None),
        ("eval.trials", "64", 64),
        ("data.text", "a.txt,folder", ("a.txt", "folder")),
        ("data.corpus", "hub:some/name", "hub:some/name"),
    ],
)
def test_a_field_is_changed_by_name_and_read_by_its_type(name, text, value):
    section, field = name.split(".")
    assert getattr(getattr(override(RunConfig(), {name: text}), section), field) == value


def test_fields_that_depend_on_each_other_are_changed_together():
    changed = override(RunConfig(), {"train.length": "100", "train.batch_tokens": "400"})
    assert (changed.train.length, changed.train.batch_tokens) == (100, 400)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.step": "5"}, "did you mean 'train.steps'"),
        ({"model.learning_rate": "5"}, "did you mean 'train.learning_rate'"),
        ({"colour": "5"}, "the fields are: model.method"),
        ({"model.method": "alibbi"}, "did you mean 'alibi'.*none, sinusoidal, learned, rotary, t5, alibi"),
        ({"train.steps": "many"}, "'many' but must be a whole number"),
        ({"train.length": "0"}, "train.length is 0 but must be 1 or more"),
        ({"train.learning_rate": "0"}, "must be above 0"),
        ({"train.learning_rate": "nan"}, "'nan' but must be a number"),
        ({"train.steps": "9" * 400}, "must be a whole number"),
        ({"train.length": "100"}, "multiple of train.length, 100; the next one is 4100"),
        (
            {"train.length": "64", "train.first_length": "48", "train.first_steps": "2", "train.accumulate": "2"},
            "multiple of train.length and train.first_length times train.accumulate, 384; the next one is 4224",
        ),
        ({"model.num_heads": "3"}, "embed_dim that 6 divides"),
        ({"eval.lengths": "128,0"}, "lengths of 1 or more"),
        ({"eval.lengths": "256,128"}, "rising order"),
        ({"eval.stride": "0"}, "eval.stride is 0"),
        ({"eval.memory": "2048"}, "eval.memory is .* from 0 to 2047, below the longest of eval.lengths"),
        ({"eval.sinks": "4,128"}, "eval.sinks is .* from 0 to 127, below the shortest of eval.lengths"),
        ({"eval.stretch": "ntk", "eval.sinks": "4"}, "eval.stretch is 'ntk', which eval.memory and eval.sinks do not"),
        ({"data.corpus": "pyhton-source"}, "did you mean 'python-source'"),
        ({"data.corpus": "text"}, "data.text"),
        ({"data.valid_share": "1"}, "together below 1"),
    ],
)
def test_errors_for_unknown_names_list_the_valid_ones(changes, message):
    with pytest.raises(ConfigError, match=message):
        override(RunConfig(), changes)


def test_a_field_of_another_type_is_refused():
    """The letters of a path are no paths: "/" is everything."""
    with pytest.raises(ConfigError, match=r"data.text is '/novels' but must be a list of values, each text"):
        DataConfig(text="/novels")
    with pytest.raises(ConfigError, match=r"eval.lengths is 128 but must be a list of values, each a whole number"):
        EvalConfig(lengths=128)


def test_json_and_back_is_the_same_config():
    config = RunConfig(
        model=ModelConfig(method="learned"),
        data=DataConfig(text=("a", "b")),
        train=TrainConfig(seed=3),
        eval=EvalConfig(stride=1, trials=64),
    )
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("section", "field", "text"),
    [
        ("data", "text_field", "body"),
        ("train", "context_parallel", "2"),
        ("train", "exchange_timeout_s", "5"),
        ("train", "compile", "true"),
        ("eval", "trials", "64"),
        ("eval", "memory", "4"),
        ("eval", "sinks", "4"),
    ],
)
def test_newer_fields_are_written_only_if_they_are_set(section, field, text):
    """So records from before these fields keep their identity."""
    plain, changed = RunConfig(), override(RunConfig(), {f"{section}.{field}": text})
    assert to_json(changed)[section].keys() - to_json(plain)[section].keys() == {field}
    assert from_json(to_json(plain)) == plain
    assert from_json(to_json(changed)) == changed


@pytest.mark.parametrize("section", ["model", "data", "train", "eval"])
def test_a_config_of_other_fields_is_refused(section):
    data = to_json(RunConfig())
    with pytest.raises(ConfigError, match=section):
        from_json({**data, section: {**data[section], "surprise": 1}})
    with pytest.raises(ConfigError):
        from_json({name: fields for name, fields in data.items() if name != section})


def test_the_vocabulary_follows_a_tokenizer_of_known_size_unless_it_is_set():
    asked = {"data.tokenizer": "bpe:2048"}
    assert override(RunConfig(), asked).model.vocab_size == 2048
    assert override(RunConfig(), {**asked, "model.vocab_size": "4096"}).model.vocab_size == 4096
    pairs = override(RunConfig(), asked)
    assert override(pairs, {"data.tokenizer": "bytes"}).model.vocab_size == 256
    assert override(pairs, {"data.tokenizer": "words"}).model.vocab_size == 2048  # unknown before the text is read


def test_shares_that_are_no_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"data.valid_share is nan"):
        DataConfig(valid_share=float("nan"))


def test_a_record_never_names_a_corpus_that_was_not_read():
    assert DataConfig(text=("a.txt",)).corpus == "text"
