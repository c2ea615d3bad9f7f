"""`alibi eval-text`: the perplexity of a whole text, equal to one pass over it, also after an interruption."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from alibi_attn.hf import reading
from alibi_lab.cli.main import app


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)).eval()
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_perplexity_of_a_text_is_that_of_one_pass(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 32)
    ids = torch.randint(1, 50, (1, 200), generator=torch.Generator().manual_seed(2))
    text = tmp_path / "book.txt"
    text.write_text(" ".join(f"w{index}" for index in ids[0].tolist()))
    with torch.no_grad():
        logits = BloomForCausalLM.from_pretrained(folder)(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    command = ["eval-text", str(folder), str(text)]

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
        assert isinstance(CliRunner().invoke(app, command).exception, StopError)
    losses = tmp_path / "book.txt.losses"
    assert losses.stat().st_size == 4 * 3 * 32
    with open(losses, "ab") as file:
        file.write(b"\0\0\0")  # as after a kill in the middle of writing
    finished = CliRunner().invoke(app, command)
    assert finished.exit_code == 0, finished.output
    np.testing.assert_allclose(np.fromfile(losses, "float32"), expected.numpy(), rtol=1e-4)
    assert f"perplexity  {float(expected.double().mean().exp()):.3f}"[:-1] in finished.output
    assert "199 tokens" in finished.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "book.txt.losses", "model"]
    again = CliRunner().invoke(app, command)
    assert "book.txt.losses exists and has no cache to continue from" in str(again.exception)
    np.testing.assert_allclose(np.fromfile(losses, "float32"), expected.numpy(), rtol=1e-4)


def test_an_empty_text_and_a_missing_model_are_refused(folder, tmp_path):
    (tmp_path / "short.txt").write_text("w1")
    short = CliRunner().invoke(app, ["eval-text", str(folder), str(tmp_path / "short.txt")])
    assert "needs at least 2" in str(short.exception)
    text = str(tmp_path / "short.txt")
    same = CliRunner().invoke(app, ["eval-text", str(folder), text, "--out", text])
    assert "is the text itself" in str(same.exception)
    assert (tmp_path / "short.txt").read_text() == "w1"
    missing = CliRunner().invoke(app, ["eval-text", str(tmp_path / "none"), str(tmp_path / "short.txt")])
    assert isinstance(missing.exception, (OSError, ValueError))


def test_a_folder_without_weights_is_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    result = CliRunner().invoke(app, ["eval-text", str(folder), str(tmp_path / "a.txt")])
    assert isinstance(result.exception, FileNotFoundError)
    assert f"{folder} has no weights" in str(result.exception)


def test_the_folder_of_the_losses_is_made(folder, tmp_path):
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    out = tmp_path / "new" / "a.losses"
    result = CliRunner().invoke(app, ["eval-text", str(folder), str(tmp_path / "a.txt"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size == 4 * 2
    assert [path.name for path in out.parent.iterdir()] == ["a.losses"]
