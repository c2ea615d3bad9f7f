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
from alibi_lab.lab.data.row_files import CorpusError, texts
from alibi_lab.lab.data.tokenizing import ByteTokenizer

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


def test_a_type_of_model_that_is_no_text_is_one_sentence(encoder, tmp_path):
    path = encoder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": {"a": 1}}))
    (tmp_path / "a.txt").write_text("a b c")
    code, _, error = ended(["embed", str(encoder), str(tmp_path / "a.txt"), "--out", str(tmp_path / "v.npy")])
    assert code == 1
    assert f"error: {path} is damaged: model_type is {{'a': 1}} but must be text; " in error


@pytest.mark.parametrize("part", ["model", "post_processor", "pre_tokenizer"])
@pytest.mark.parametrize("command", ["embed", "eval-text"])
def test_a_tokenizer_that_does_not_load_is_one_sentence(part, command, encoder, tmp_path):
    model = encoder if command == "embed" else write_decoder(tmp_path / "bloom")
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: {"type": "Unknown"}}))
    (tmp_path / "a.txt").write_text("a b c")
    code, _, error = ended([command, str(model), str(tmp_path / "a.txt"), "--out", str(tmp_path / "v.npy")])
    assert code == 1
    assert f"error: {model} has no tokenizer that transformers can load (data did not match" in error


def test_a_tokenizer_that_cannot_encode_is_one_sentence(encoder, tmp_path):
    path = encoder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "missing"
    path.write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("a words b")
    code, _, error = ended(["embed", str(encoder), str(tmp_path / "a.txt"), "--out", str(tmp_path / "v.npy")])
    assert code == 1
    assert f"error: the tokenizer of {encoder} cannot encode a text (" in error


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
        ByteTokenizer().encode(HALF)
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
