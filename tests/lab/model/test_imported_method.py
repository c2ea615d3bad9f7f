"""Position methods from the user's own file: trained, recorded, loaded only if named, and reported if changed."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from small_runs import TINY, sets
from typer.testing import CliRunner

from alibi_attn.strict_json import sealed
from alibi_lab import records
from alibi_lab.cli.main import app, main
from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.model.method_checks import imported_method, source_facts
from alibi_lab.lab.model.position_method import Pass
from alibi_lab.lab.model.positions import ALiBi
from alibi_lab.lab.training.checkpoint import CheckpointError, load_checkpoint

RUNNER = CliRunner()
MINE = '''
import torch
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.lab.model.position_method import Pass
from alibi_lab.lab.model.positions import ALiBi
from alibi_lab.position_methods import Look

class MyBias(PositionMethod):
    """ALiBi, written out: the attention hook applies the bias and the mask."""

    per_layer = True
    look = Look("my own bias", "#123456", "#abcdef", "4")

    def __init__(self, config, trained_length):
        super().__init__(config, trained_length)
        self.alibi = ALiBi(config, trained_length)

    def attend(self, q, k, v, at, default):
        distance = torch.arange(at.key_len)[-at.query_len :, None] - torch.arange(at.key_len)
        scores = q @ k.mT / q.shape[-1] ** 0.5 - self.alibi.slopes[:, None, None] * distance
        return scores.masked_fill(~at.visible(q.device), -torch.inf).softmax(-1) @ v

class Remembers(ALiBi):
    """ALiBi in segments of 4 tokens, each with a memory of 3 tokens."""

    segment, memory = 4, 3

class FirstTokens(PositionMethod):
    """A test of any model: the loss of the first tokens of the text."""

    @classmethod
    def curves(cls, model, corpus, config):
        row = corpus.valid[:9][None].long()
        nats = model(row[:, :-1], targets=row[:, 1:])[0]
        return {"first_tokens": {"token": list(range(1, 9)), "nats": nats.tolist(), "train": [len(corpus.train)] * 8}}
'''
CHANGES = sets(TINY | {"train.steps": "3"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine")
    (path / "mine.py").write_text(MINE)
    (path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    for method, out in (("mine.py:MyBias", "own"), ("alibi", "built-in")):
        command = ["run", "--text", str(path / "a.txt"), "--out", str(path / out), *CHANGES]
        method = str(path / method) if ":" in method else method
        result = RUNNER.invoke(app, [*command, "--set", f"model.method={method}"])
        assert result.exit_code == 0, result.output
    return path


def copied(step: Path, folder: Path, *, method: str) -> Path:
    """A checkpoint with the same files that names another method."""
    shutil.copytree(step, folder)
    about = json.loads((folder / "config.json").read_bytes())
    about["config"]["model"]["method"] = method
    del about["sha256"]
    (folder / "config.json").write_bytes(sealed(about))
    return folder


def test_a_user_defined_attention_gives_the_losses_of_the_built_in_one(folder: Path) -> None:
    own, built_in = (list(records.find(folder / out / "records", kind="evaluation")) for out in ("own", "built-in"))
    for name in ("nonoverlapping_nats", "sliding_nats"):
        torch.testing.assert_close(
            own[0].curves["by_length"][name], built_in[0].curves["by_length"][name], rtol=1e-4, atol=0
        )


def test_records_and_checkpoints_keep_the_path_the_hash_and_the_look(folder: Path) -> None:
    path = str(folder / "mine.py:MyBias")
    (record,) = records.find(folder / "own" / "records", kind="evaluation")
    assert record.name == "quick/MyBias-16/seed-0"
    facts = record.config["method"]
    assert facts == source_facts(path)
    assert (facts["path"], facts["label"], facts["dark"], facts["marker"]) == (path, "my own bias", "#abcdef", "4")
    (saved,) = (folder / "own" / "checkpoints").glob("**/config.json")
    assert json.loads(saved.read_bytes())["method"] == facts
    (plain,) = records.find(folder / "built-in" / "records", kind="evaluation")
    assert "method" not in plain.config


def test_a_checkpoint_imports_nothing_that_the_caller_does_not_name(folder: Path, tmp_path: Path) -> None:
    (checkpoint,) = (folder / "own" / "checkpoints" / "quick" / "MyBias-16").iterdir()
    with pytest.raises(CheckpointError, match=r"not built in.*never imported.*--method .*mine.py:MyBias"):
        load_checkpoint(checkpoint)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{MINE}")
    copy = copied(next(checkpoint.iterdir()), tmp_path / "copy", method=f"{evil}:MyBias")
    model, text = str(copy), str(folder / "a.txt")
    for command in (
        ["generate", model, "--prompt", "a"],
        ["heads", "summary", model],
        ["eval", model, "--text", text],
        ["export", model, str(tmp_path / "x")],
    ):
        result = RUNNER.invoke(app, command)
        assert "never imported" in str(result.exception), result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("out", "method"), [("own", "alibi"), ("built-in", "mine.py:MyBias"), ("built-in", "t5")])
def test_a_method_that_did_not_train_the_model_is_refused(folder: Path, out: str, method: str) -> None:
    (checkpoint,) = (folder / out / "checkpoints" / "quick").glob("*/*")
    method = str(folder / method) if ":" in method else method
    with pytest.raises(CheckpointError, match=rf"was trained with .*, not '{method}'; pass the class that trained it"):
        load_checkpoint(checkpoint, method=method)


def test_eval_with_the_code_equals_the_run_and_a_changed_file_is_reported(folder: Path, tmp_path: Path) -> None:
    arguments = ["eval", str(folder / "own"), "--text", str(folder / "a.txt"), "--lengths", "8,16", "--tokens", "32"]
    method = str(folder / "mine.py:MyBias")
    result = RUNNER.invoke(app, [*arguments, "--method", method, "--out", str(tmp_path / "records")])
    assert result.exit_code == 0, result.output
    (record,) = records.find(tmp_path / "records")
    assert record.config["method"] == source_facts(method)
    changed = tmp_path / "mine.py"
    changed.write_text(MINE.replace("my own bias", "another label"))
    with pytest.warns(UserWarning, match=r"mine.py:MyBias has changed since it trained"):
        load_checkpoint(next((folder / "own" / "checkpoints").glob("*/*/*")), method=f"{changed}:MyBias")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(next((folder / "own" / "checkpoints").glob("*/*/*")), method=method)


def test_a_test_from_a_file_runs_on_a_built_in_model(folder: Path, tmp_path: Path) -> None:
    arguments = [
        "eval",
        f"{folder / 'built-in'}:alibi",
        "--text",
        str(folder / "a.txt"),
        "--lengths",
        "8,16",
        "--tokens",
        "32",
    ]
    result = RUNNER.invoke(
        app, [*arguments, "--method", str(folder / "mine.py:FirstTokens"), "--out", str(tmp_path / "records")]
    )
    assert result.exit_code == 0, result.output
    assert "first_tokens" in result.output
    (record,) = records.find(tmp_path / "records")
    assert record.curves["first_tokens"]["train"] == [3990] * 8
    assert record.config["tests"] == [source_facts(str(folder / "mine.py:FirstTokens"))]
    refused = RUNNER.invoke(app, [*arguments, "--method", str(folder / "mine.py:Remembers")], env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert "was trained with alibi" in refused.output


def test_a_memory_in_training_equals_its_mask_and_has_no_gradient(tiny_model, folder: Path) -> None:
    """With one layer, a segment's tokens see itself and 3 earlier tokens: the same as a full pass with that mask."""
    one_layer = tiny_model(str(folder / "mine.py:Remembers"), num_layers=1).train()
    full = tiny_model("none", num_layers=1).train()
    full.load_state_dict(one_layer.state_dict())
    tokens = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(0))
    at = torch.arange(13)
    first = at // 4 * 4
    hidden = (at > at[:, None]) | (at < (first - 3)[:, None])
    slopes = one_layer.position.slopes
    bias = -slopes[:, None, None] * (at[:, None] - at)
    full.position.bias = lambda _: bias.masked_fill(hidden, -torch.inf)
    ours = one_layer(tokens[:, :-1], targets=tokens[:, 1:])
    torch.testing.assert_close(ours, full(tokens[:, :-1], targets=tokens[:, 1:]), rtol=1e-5, atol=1e-5)
    for segment, reaches in ((4, False), (8, True)):
        hidden = one_layer._hidden_in_segments(torch.arange(8)[None], Pass(8, 8), segment)[:, 4:]
        (gradient,) = torch.autograd.grad(hidden.square().sum(), one_layer.embedding.weight)
        assert bool((gradient[:4] != 0).any()) is reaches
    with pytest.raises(ConfigError, match="reads texts in segments of 4 tokens"):
        one_layer(tokens, segment_ids=torch.zeros_like(tokens))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "mine.py:Missing",
            r"has no subclass of PositionMethod named Missing; it defines MyBias, Remembers, FirstTokens",
        ),
        ("other.py:MyBias", r"other.py cannot be read \(No such file"),
        ("mine.py:torch", r"has no subclass of PositionMethod named torch"),
        ("no_such_package.methods:Mine", "there is no module no_such_package"),
    ],
)
def test_a_wrong_path_is_one_sentence(folder: Path, method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imported_method(str(folder / method) if ".py" in method else method)
    assert imported_method("alibi_lab.lab.model.rotary:DroPE").__name__ == "DroPE"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = = 2", "line 4: SyntaxError: invalid syntax"),
        ("import no_such_package", "line 4: ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "class A(ALiBi):\n    def rotate(self, q, k, *_): return torch.nn.functional.linear(q, k), k",
            "line 5: RuntimeError: ",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_before_any_model_trains(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "typo.py").write_text(f"import torch\nfrom {ALiBi.__module__} import ALiBi\n\n{body}\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--scale", "smoke", "--methods", "alibi,typo.py:A", "--out", "out"]
    monkeypatch.setattr("sys.argv", ["alibi", *arguments, *CHANGES])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert f"error: typo.py, {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_error_inside_this_package_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "from alibi_attn.units import bits_per_byte\nbits_per_byte(1.0, bytes_per_token=0)\n"
    (tmp_path / "mine.py").write_text(body)
    monkeypatch.setattr("sys.argv", ["alibi", "run", "--methods", f"{tmp_path / 'mine.py'}:A", "--out", str(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        main()
