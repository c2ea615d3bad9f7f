"""Damaged folders of models and broken tokenizers: a command gives a result, or one sentence with the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from damaged_models import Attack, ended, write_decoder
from encoder_oracle import config, random_state, write_folder, write_tokenizer

from alibi_attn.cli import console
from alibi_attn.hf import late_chunks
from alibi_lab.lab.data.sources import CorpusError, texts
from alibi_lab.lab.data.tokenizing import byte_tokenizer

HALF = "a \ud800 b"


@pytest.mark.parametrize("draws", [12, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", ["embed", "eval-text", "heads", "generate", "export"])
def test_a_damaged_model_ends_in_a_result_or_in_one_sentence(command, draws, tmp_path):
    attack = Attack(command, tmp_path)
    outcomes = {attack.draw(seed) for seed in range(draws)}
    assert "refused" in outcomes


@pytest.fixture
def encoder(tmp_path):
    return write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))


def change(path, *names, to):
    """Replaces the value at a path of names in a JSON file."""
    content = inner = json.loads(path.read_text())
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = to
    path.write_text(json.dumps(content))


UNKNOWN, NO_TOKENIZER = {"type": "Unknown"}, "{} has no tokenizer that transformers can load (data did not match"
WRONG = [
    ("config.json", ("model_type",), [1], "{}/config.json is damaged: model_type is [1] but must be text; "),
    ("tokenizer.json", ("model",), UNKNOWN, NO_TOKENIZER),
    ("tokenizer.json", ("post_processor",), UNKNOWN, NO_TOKENIZER),
    ("tokenizer.json", ("pre_tokenizer",), UNKNOWN, NO_TOKENIZER),
    ("tokenizer.json", ("model", "unk_token"), "missing", "the tokenizer of {} cannot encode a text ("),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), WRONG)
def test_a_wrong_value_in_a_file_is_one_sentence(name, place, value, message, encoder, tmp_path):
    (tmp_path / "a.txt").write_text("a words b")
    models = {"embed": encoder} | ({"eval-text": write_decoder(tmp_path / "bloom")} if value is UNKNOWN else {})
    for command, model in models.items():
        change(model / name, *place, to=value)
        code, _, error = ended([command, str(model), str(tmp_path / "a.txt"), "--out", str(tmp_path / "v.npy")])
        assert code == 1
        assert f"error: {message.format(model)}" in error


def test_vectors_that_are_not_finite_leave_no_file(encoder, tmp_path):
    state = random_state("jina")
    state["embeddings.LayerNorm.weight"][0] = float("nan")
    (tmp_path / "a.txt").write_text("a b")
    write_tokenizer(write_folder(tmp_path / "nan", state, config("jina")))
    code, _, error = ended(["embed", str(tmp_path / "nan"), str(tmp_path / "a.txt"), "--out", str(tmp_path / "v.npy")])
    assert code == 1
    assert f"{tmp_path / 'nan'} computed numbers that are not finite" in error
    assert not list(tmp_path.glob("v.npy*"))


def test_half_of_a_surrogate_pair_is_refused_by_its_place(encoder, tmp_path):
    with pytest.raises(ValueError, match=r"text 1 has \\ud800, half of a surrogate pair and no character; correct it"):
        late_chunks(str(encoder), ["a", HALF])
    with pytest.raises(CorpusError, match=r"the text has \\ud800, half of a surrogate pair"):
        byte_tokenizer().encode(HALF)
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps({'text': 'a'})}\n{json.dumps({'text': HALF})}\n")
    with pytest.raises(CorpusError, match=rf"row 2 of {path} has \\ud800, half of a surrogate pair"):
        list(texts(path, ""))


def test_names_that_are_not_utf_8_are_refused_before_the_work(encoder, tmp_path):
    """No record and no table can hold them, and a record that names one could not be read again."""
    odd, sound = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), tmp_path / "a.txt"
    for path in (odd, sound):
        path.write_text("a b c " * 300)
    run = ["run", "quick", "--scale", "smoke", "--no-report"]
    for arguments in (
        ["embed", str(encoder), str(odd), "--out", str(tmp_path / "v.npy")],
        ["embed", str(encoder), str(sound), "--out", str(odd)],
        [*run, "--text", str(odd), "--out", str(tmp_path / "out")],
        [*run, "--text", str(sound), "--out", str(odd)],
    ):
        before = sorted(tmp_path.iterdir())
        code, _, error = ended(arguments)
        assert code == 1
        assert f"error: {ascii(str(odd))[:-1]}" in error
        assert "is a name that is not UTF-8" in error
        assert sorted(tmp_path.iterdir()) == before


def test_a_text_that_is_too_short_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    code, _, error = ended(["run", "quick", "--scale", "smoke", "--text", str(path), "--out", str(tmp_path / "out")])
    assert code == 1
    assert f"error: {path} has 1 bytes of text" in error
    assert not (tmp_path / "out").exists()


def test_a_command_whose_reader_has_gone_ends_without_a_message():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "alibi_attn", "--help"]
    ended_early = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended_early.returncode, ended_early.stderr) == (141, b"")


def test_a_broken_pipe_of_plain_output_is_no_error():
    def printing():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as caught:
        console.run(printing, ("alibi_attn",), lambda error: None)
    assert caught.value.code == 141
