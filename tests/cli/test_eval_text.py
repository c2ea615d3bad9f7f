"""`alibi eval-text`: the perplexity of a whole text, equal to one pass over it, also after an interruption."""

import functools
import re

import numpy as np
import pytest
import torch
from commands import alibi
from damaged_models import write_decoder
from transformers import BloomForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner

from alibi_attn import files
from alibi_attn.hf.patching import reading
from alibi_attn.nn.cache import file as cache_file
from alibi_lab.cli.main import app

run = functools.partial(alibi, "eval-text")
refusal = functools.partial(run, code=1)
WORDS = [chr(98 + index % 25) for index in range(150)]


@pytest.fixture
def folder(tmp_path):
    return write_decoder(tmp_path / "model")


def test_the_perplexity_of_a_text_is_that_of_one_pass(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 32)
    ids = torch.randint(1, 26, (1, 200), generator=torch.Generator().manual_seed(2))
    text = tmp_path / "book.txt"
    text.write_text(" ".join(chr(97 + index) for index in ids[0].tolist()))
    with torch.no_grad():
        logits = BloomForCausalLM.from_pretrained(folder)(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")

    class StopError(RuntimeError):
        pass

    calls, forward = [], BloomForCausalLM.forward

    def interrupted(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise StopError
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(BloomForCausalLM, "forward", interrupted)
        stopped = type(CliRunner().invoke(app, ["eval-text", str(folder), str(text)]).exception)
    assert stopped is StopError  # the exception itself would keep the losses open
    losses = tmp_path / "book.txt.losses"
    assert losses.stat().st_size == 4 * 3 * 32
    with open(losses, "ab") as file:
        file.write(b"\0\0\0")  # as after a kill in the middle of writing
    finished = run(folder, text)
    np.testing.assert_allclose(np.fromfile(losses, "float32"), expected.numpy(), rtol=1e-4)
    assert f"perplexity  {float(expected.double().mean().exp()):.3f}"[:-1] in finished
    assert "199 tokens" in finished
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "book.txt.losses", "model"]
    assert "book.txt.losses is complete" in refusal(folder, text)
    np.testing.assert_allclose(np.fromfile(losses, "float32"), expected.numpy(), rtol=1e-4)


def test_an_empty_text_and_a_missing_model_are_refused(folder, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("b")
    assert "needs at least 2" in refusal(folder, text)
    assert "is the text itself" in refusal(folder, text, "--out", text)
    assert text.read_text() == "b"
    assert "does not exist" in refusal(tmp_path / "none", text)


def test_bars_of_loading_stay_out_of_logs(folder, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("b c d")
    logging.enable_progress_bar()
    try:
        result = CliRunner().invoke(app, ["eval-text", str(folder), str(text)])
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()
    assert result.exit_code == 0, result.output
    assert "it/s" not in result.stderr


def test_the_folder_of_the_losses_is_made(folder, tmp_path):
    (tmp_path / "a.txt").write_text("b c d")
    out = tmp_path / "new" / "a.losses"
    run(folder, tmp_path / "a.txt", "--out", out)
    assert out.stat().st_size == 4 * 2
    assert [path.name for path in out.parent.iterdir()] == ["a.losses"]


def content(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.mark.parametrize("changed", ["model", "text", "shorter"])
def test_a_refused_command_leaves_the_cache_and_the_losses(changed, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CAPACITY", 1)  # small files
    text, cache, losses = tmp_path / "a.txt", tmp_path / "cache", tmp_path / "a.losses"
    text.write_text(" ".join(WORDS))
    run(folder, text, "--cache", cache, "--out", losses)
    before, numbers = content(cache), losses.read_bytes()
    if changed == "model":
        with torch.no_grad():
            model = BloomForCausalLM.from_pretrained(folder)
            model.transformer.h[1].mlp.dense_h_to_4h.weight.mul_(1.5)
            model.save_pretrained(folder)
    else:
        text.write_text(" ".join(WORDS[:100] if changed == "shorter" else ["d", *WORDS[1:]]))
    message = {
        "model": "was written by a model with other weights",
        "text": "holds another text",
        "shorter": "holds 150 tokens but the text has 100",
    }
    for out in (losses, tmp_path / "other.losses"):  # with losses of nothing, all of the cache would be read again
        assert message[changed] in refusal(folder, text, "--cache", cache, "--out", out)
        assert content(cache) == before
        assert losses.read_bytes() == numbers
        assert not (tmp_path / "other.losses").exists()


def test_a_longer_text_continues_and_losses_that_were_deleted_are_computed_again(folder, tmp_path):
    text, cache, losses = tmp_path / "a.txt", tmp_path / "cache", tmp_path / "a.txt.losses"
    for count in (100, 150):
        text.write_text(" ".join(WORDS[:count]))
        run(folder, text, "--cache", cache)
    numbers = np.fromfile(losses, "float32")
    losses.unlink()
    run(folder, text, "--cache", cache)
    np.testing.assert_allclose(np.fromfile(losses, "float32"), numbers, rtol=1e-5)
    assert len(numbers) == 149


@pytest.mark.parametrize("damaged", ["a.txt.losses", "a.txt.losses.crc", "cache/layer-001"])
def test_what_an_earlier_run_left_is_verified_before_it_is_continued(damaged, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CAPACITY", 1)  # small files
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text(" ".join(WORDS[:100]))
    run(folder, text, "--cache", cache)
    text.write_text(" ".join(WORDS))
    content = bytearray((tmp_path / damaged).read_bytes())
    at = content.rindex(bytes([next(byte for byte in reversed(content) if byte)]))  # of the last number
    content[at] ^= 1
    (tmp_path / damaged).write_bytes(content)
    assert re.search(r"(a\.txt\.losses|layer-001) is damaged", refusal(folder, text, "--cache", cache))


def test_a_loss_beyond_floating_point_is_infinite_perplexity(folder, tmp_path):
    with torch.no_grad():
        model = BloomForCausalLM.from_pretrained(folder)
        model.transformer.ln_f.weight.mul_(1e6)
        model.save_pretrained(folder)
    (tmp_path / "a.txt").write_text("b c d e")
    output = run(folder, tmp_path / "a.txt")
    mean = np.fromfile(tmp_path / "a.txt.losses", "float32").astype(float).mean()
    assert mean > 709
    assert f"perplexity  inf  ({mean:.4f} nats per token" in output


def test_two_processes_do_not_write_the_same_losses(folder, tmp_path):
    text, losses = tmp_path / "a.txt", tmp_path / "a.txt.losses"
    text.write_text("b c d e")
    with files.locked(losses, "free"):
        assert "another process is writing" in refusal(folder, text)
    run(folder, text)
