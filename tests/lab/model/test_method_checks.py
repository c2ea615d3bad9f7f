"""Position methods with mistakes: each is refused, with the file and line, before anything is trained or evaluated."""

import dataclasses
from pathlib import Path

import pytest
import torch
from small_runs import TINY, sets

from alibi_lab.cli.main import main
from alibi_lab.lab.config import ModelConfig, RunConfig
from alibi_lab.lab.config_io import override
from alibi_lab.lab.data.corpus import whole_text
from alibi_lab.lab.data.tokenizing import byte_tokenizer
from alibi_lab.lab.evaluation.evaluate import own_curves
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.method_checks import imported_method
from alibi_lab.lab.model.method_trial import try_method
from alibi_lab.lab.model.position_method import PositionError, PositionMethod
from alibi_lab.lab.model.positions import METHODS, ALiBi
from alibi_lab.lab.training.checkpoint import CheckpointError, load_checkpoint
from alibi_lab.lab.training.train import train

SMALL = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "embed_dim": 16, "ffn_dim": 24}
FIELDS = TINY | {"train.steps": "90", "train.batch_tokens": "16"}
HEAD = f"""import torch
from torch import nn
from {PositionMethod.__module__} import ByDistance, ContentBias, ForgetGates, PositionMethod, Windowed
from {ALiBi.__module__} import ALiBi

class A(PositionMethod):
"""
INIT = "    def __init__(self, config, trained_length):\n        "
# A body of the class, or a hook; and what is said about it.
WRONG = [
    (
        "attend(self, q, k, v, at, default): return default(q, k, v)[:, :, :1]",
        r"A.attend returned a tensor of shape \[1, 2, 1, 8\].*must return a tensor of shape \[1, 2, 16, 8\]",
    ),
    (
        "attend(self, q, k, v, at, default): return default(q, k, v).double()",
        "A.attend returned .*torch.float64 .*must return .*torch.float32",
    ),
    ("attend(self, q, k, v, at, default): return default(q, k, v) * float('nan')", "A.attend returned NaN"),
    (
        "attend(self, q, k, v, at, default): return default(q, k, v if self.training else v.roll(-1, 2))",
        "A sees the future",
    ),
    (
        "    steps = 0\n    def add(self, x, positions): self.steps += 1; return x * (1 + self.steps / 10)",
        "A gives other logits when the same tokens are read again",
    ),
    (
        "add(self, x, positions): return x.tolist()",
        r"A.add returned a list; it must return a tensor of shape \[1, 16, 16\]",
    ),
    ("rotate(self, q, k, positions, at): return q", "A.rotate returned a tensor"),
    ("bias(self, at): return [0.5, 0.25]", r"A.bias returned a list; it must return slopes \[H\]"),
    (
        "bias(self, at): return torch.ones(3)",
        r"A.bias returned a tensor of shape \[3\].*must be floating, \[2\] or \[2, 16, 16\]",
    ),
    ("bias(self, at): return torch.full((2,), float('nan'))", r"A.bias returned a tensor with NaN or \+inf"),
    (
        "bias(self, at): return ByDistance(torch.zeros(2, 5))",
        r"A.bias returned the table of ByDistance of shape \[2, 5\]",
    ),
    (
        "    per_layer = True\n    def bias(self, at): return ContentBias([1.0])",
        "A.bias returned key_bias of type list",
    ),
    ("bias(self, at): return Windowed(0)", r"A.bias returned Windowed\(window=0\)"),
    (f"{INIT}self.own = 1", r"A.__init__ does not call super\(\).__init__\(config, trained_length\)"),
    (
        "__init__(self): super().__init__(None, 1)",
        r"A.__init__ must accept the arguments \(config, trained_length\): too many positional",
    ),
    ("bias(self): return None", r"A.bias must accept the arguments \(self, at\)"),
    ("    bias = None", "A has bias = None; it must be a method"),
    ("curves(self, model, corpus, config): return {}", "A.curves must accept .*make it a class method"),
    ("    look = 'red'", "A.look is 'red' but must be a Look or none"),
    ("    segment = '4'", "A.segment is '4' but must be a whole number or none"),
    ("    segment, memory = 4, -1", "A.memory is -1 but must be 0 or more"),
    ("    stretches = 'linear'", "A.stretches is 'linear' but must be a list of values, each one of"),
    (
        f"{INIT}super().__init__(config, trained_length)\n"
        "        self.p = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)",
        r"A has a parameter p of shape \[3\] and torch.int64; parameters are floating",
    ),
    (
        f"{INIT}super().__init__(config, trained_length)\n        self.p = nn.Parameter(torch.ones(3, 0))",
        r"A has a parameter p of shape \[3, 0\]",
    ),
    (
        f"{INIT}super().__init__(config, trained_length)\n        self.p = nn.Parameter(torch.zeros(2))\n"
        "    def bias(self, at): return ByDistance(-(self.p[:, None] * torch.arange(at.key_len)).sqrt())",
        "A gives position.p a gradient with NaN or infinite numbers",
    ),
    (
        "    def rotate(self, q, k, positions, at):\n        q = q.exp()\n        q.add_(1)\n        return q, k",
        "A has no gradients",
    ),
]


def written(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    (path / "mine.py").write_text(f"{HEAD}{body}\n")
    monkeypatch.chdir(path)
    return ModelConfig(method="mine.py:A", **SMALL)


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_method_is_refused_with_its_line(
    wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = not wrong.startswith(" ")
    config = written(tmp_path, f"    def {wrong}" if hook else wrong, monkeypatch)
    with pytest.raises(PositionError, match=rf"^mine.py, line {7 if hook else '[678]'}: {message}"):
        try_method(config, 16)


@pytest.mark.parametrize("method", METHODS)
def test_every_built_in_method_passes(method: str) -> None:
    for stretch in ("none", *METHODS[method].stretches):
        try_method(ModelConfig(method=method, **SMALL), 16, stretch=stretch)


def test_a_method_that_draws_numbers_and_scalar_parameters_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        f"{INIT}super().__init__(config, trained_length)\n        self.p = nn.Parameter(torch.tensor(2.0))\n"
        "    def add(self, x, positions): return x + self.p * torch.rand(x.shape[-1])"
    )
    config = written(tmp_path, body, monkeypatch)
    try_method(config, 16)
    assert LanguageModel(config, trained_length=16).position.p == 2


def test_a_stretch_that_returns_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    stretches = ('linear',)\n    def stretched(self, stretch, length): self.length = length"
    config = written(tmp_path, body, monkeypatch)
    try_method(config, 16)
    with pytest.raises(PositionError, match=r"^mine.py, line 8: A.stretched returned None; it must return a position"):
        try_method(config, 16, stretch="linear")


def test_an_attend_that_broadcasts_in_one_call_only_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "    def attend(self, q, k, v, at, default): return default(q, k, v)[:, :, : 1 if at.query_len == 99 else None]"
    )
    config = written(tmp_path, body, monkeypatch)
    try_method(config, 16)
    with pytest.raises(PositionError, match=r"returned a tensor of shape \[1, 2, 1, 8\]"):
        LanguageModel(config, trained_length=16)(torch.zeros(1, 99, dtype=torch.long))


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ("None", "returned None"),
        ("{'a': {'x': [1.0, 2.0], 'y': [1.0]}}", "it must return curves"),
        ("{'a': {'x': torch.ones(2)}}", "it must return curves"),
    ],
)
def test_wrong_curves_are_refused(curves: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"    @classmethod\n    def curves(cls, model, corpus, config): return {curves}"
    written(tmp_path, body, monkeypatch)
    with pytest.raises(PositionError, match=rf"^mine.py, line 7: A.curves .*{message}"):
        own_curves(imported_method("mine.py:A"), None, None, None)


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        ("module", "import sys; sys.exit()"),
        ("attend", "raise SystemExit(0)"),
        ("attend", "import typer; raise typer.Exit(0)"),
        ("training", "import sys; sys.exit()"),
    ],
)
def test_a_method_that_exits_is_an_error(
    hook: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = "if self.calls > 60: " if hook == "training" else ""
    attend = "    calls = 0\n    def attend(self, q, k, v, at, default):\n        self.calls += 1\n"
    body = (
        "    pass\n" + how if hook == "module" else f"{attend}        {condition}{how}\n        return default(q, k, v)"
    )
    written(tmp_path, body, monkeypatch)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    command = ["alibi", "run", "--text", "a.txt", "--methods", "mine.py:A", "--out", "out", *sets(FIELDS)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert f"mine.py, line {8 if hook == 'module' else 10}: " in capsys.readouterr().err


def test_a_checkpoint_and_a_benchmark_refuse_code_that_sees_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "    pass", monkeypatch)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    config = override(RunConfig(), FIELDS | {"train.steps": "1", "model.method": "mine.py:A"})
    corpus = whole_text([tmp_path / "a.txt"], byte_tokenizer())
    train(config, dataclasses.replace(corpus, train=corpus.valid), tmp_path / "run")
    assert load_checkpoint(tmp_path / "run", method="mine.py:A")[0].num_parameters() > 0
    written(tmp_path, "    def add(self, x, positions): return x + x.roll(-1, 1)", monkeypatch)
    with (
        pytest.warns(UserWarning, match="has changed"),
        pytest.raises(PositionError, match="line 7: A sees the future"),
    ):
        load_checkpoint(tmp_path / "run", method="mine.py:A")
    monkeypatch.setattr("sys.argv", ["alibi", "bench", "training", "--scale", "smoke", "--methods", "mine.py:A"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "line 7: A sees the future" in capsys.readouterr().err
    body = f"{INIT}super().__init__(config, trained_length)\n        self.p = nn.Parameter(torch.ones(3))"
    written(tmp_path, body, monkeypatch)
    with (
        pytest.warns(UserWarning, match="has changed"),
        pytest.raises(CheckpointError, match=r"has the parameters {'position.p': \[3\]} but .* was trained with none"),
    ):
        load_checkpoint(tmp_path / "run", method="mine.py:A")
