"""The command line: its output, its files, its errors and exit codes."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import alibi
from programs import printed

import alibi_attn
from alibi_lab import records

ALIBI = [sys.executable, "-m", "alibi_lab"]
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _alibi(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command in a separate process, for the real exit code."""
    return subprocess.run(
        [*ALIBI, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=cwd,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `alibi run quick --scale smoke`."""
    out = tmp_path_factory.mktemp("runs") / "quick"
    result = _alibi("run", "quick", "--scale", "smoke", "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="session")
def checkpoint(smoke: Path) -> Path:
    return next((smoke / "checkpoints" / "quick" / "alibi-16").iterdir())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("def f(x):\n    return x + 1\n" * 30)
    return path


def test_running_quick_writes_records_and_a_report_of_the_same_numbers(smoke: Path) -> None:
    loaded = list(records.find(smoke / "records"))
    assert sorted({record.config["model"]["method"] for record in loaded}) == ["alibi", "rotary", "sinusoidal", "t5"]
    assert sorted(record.kind for record in loaded) == ["evaluation"] * 4 + ["training"] * 4
    page = (smoke / "report.html").read_text()
    in_page = {round(float(value), 9) for value in re.findall(r'<td[^>]*><data value="([^"]+)">', page)}
    perplexities = [
        math.exp(nats)
        for record in loaded
        if record.kind == "evaluation"
        for column in ("nonoverlapping_nats", "sliding_nats")
        for nats in record.curves["by_length"][column]
    ]
    assert len(perplexities) == 4 * 2 * 3
    assert {round(perplexity, 9) for perplexity in perplexities} <= in_page
    assert loaded[0].config["corpus"]["sha256"] in page
    assert all(1 < perplexity < 300 for perplexity in perplexities)


def test_a_second_run_skips_recorded_runs(smoke: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (smoke / "records").iterdir()}
    output = alibi("run", "quick", "--scale", "smoke", "--out", smoke, "--no-report")
    assert output.count("is recorded already") == 4
    assert "report" not in output.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in (smoke / "records").iterdir()} == before


def test_set_and_text_reach_the_records(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    out = tmp_path / "out"
    changes = ["--set", "train.steps=2", "--set", "model.method=alibi", "--seeds", "3,5"]
    alibi("run", "--scale", "smoke", "--out", out, "--text", text, "--no-report", *changes)
    loaded = list(records.find(out / "records", kind="training"))
    assert sorted(record.config["train"]["seed"] for record in loaded) == [3, 5]
    assert all(record.config["train"]["steps"] == 2 for record in loaded)
    assert all(record.config["data"]["text"] == [str(text)] for record in loaded)
    assert not (out / "report.html").exists()


def test_report_reads_run_folders_and_record_files(smoke: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    alibi("report", smoke, "--out", page, "--title", "My title")
    assert "My title" in page.read_text()
    one = next((smoke / "records").glob("evaluation-*alibi*"))
    alibi("report", one, "--out", page)
    assert "comes from 1 record." in page.read_text()


def test_eval_agrees_with_the_run(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["eval", checkpoint, "--text", text, "--lengths", "16,64", "--tokens", 64]
    output = alibi(*arguments, "--out", tmp_path / "records")
    (record,) = records.find(tmp_path / "records")
    assert record.curves["by_length"]["length"] == [16, 64]
    assert record.config["corpus"]["valid_tokens"] == 27 * 30
    assert f"{2.718281828459045 ** record.curves['by_length']['sliding_nats'][0]:.1f}" in output


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--lengths", "a"], 2, "--lengths is 'a' but must be a whole number"),
        (["--lengths", "32,16"], 2, "--lengths is (32, 16); pass lengths of 1 or more"),
        (["--tokens", "0"], 2, "--tokens is 0 but must be 1 or more"),
        (["--lengths", "16", "--memory", "16"], 2, "--memory is (16,); pass numbers of tokens from 0 to 15, below the"),
        (["--lengths", "16,512"], 1, "--text has 810 tokens but --lengths up to 512 need 1024: 512 to score"),
    ],
)
def test_errors_of_eval_name_its_options(
    options: list[str], code: int, words: str, checkpoint: Path, text: Path
) -> None:
    message = alibi("eval", checkpoint, "--text", text, *options, code=code)
    assert words in message
    assert "eval." not in message


def test_eval_reads_in_segments_with_a_memory(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["eval", checkpoint, "--text", text, "--lengths", "16,64", "--tokens", 64, "--memory", 16]
    output = alibi(*arguments, "--out", tmp_path / "records")
    (record,) = records.find(tmp_path / "records")
    curve = record.curves["streams"]
    assert (curve["way"], curve["length"], curve["kept"]) == (["cached segments"] * 2, [16, 64], [16, 16])
    assert "Perplexity per byte, cached segments, 16 tokens of memory" in output
    assert f"{2.718281828459045 ** curve['nats'][0]:.1f}" in output
    assert (record.config["eval"]["memory"], "sinks" in record.config["eval"]) == ([16], False)


def test_text_replaces_any_corpus(text: Path, tmp_path: Path) -> None:
    arguments = ["run", "recall", "--scale", "smoke", "--no-report"]
    for change in ("model.method=alibi", "train.steps=2", "eval.lengths=8,16", "eval.tokens=16", "eval.tasks="):
        arguments += ["--set", change]
    text.write_text(text.read_text() * 7)
    alibi(*arguments, "--out", tmp_path / "run")
    (folder,) = {path.parent for path in (tmp_path / "run" / "checkpoints").rglob("model.safetensors")}
    alibi("eval", folder, "--text", text, "--lengths", "8,16", "--tokens", "16")
    alibi(*arguments, "--text", text, "--out", tmp_path / "text")
    assert {record.config["corpus"]["name"] for record in records.find(tmp_path / "text" / "records")} == {"text"}


def test_generate_continues_beyond_the_trained_length_and_is_reproducible(checkpoint: Path) -> None:
    arguments = ["generate", checkpoint, "--prompt", "def é", "--max-new-tokens", 40, "--seed"]
    first, second, other = (alibi(*arguments, seed) for seed in (1, 1, 2))
    assert first.startswith("def é")
    assert len(first) > 30
    assert first == second != other


def test_a_paper_item_writes_its_page_and_refuses_changes_to_its_comparison(tmp_path: Path) -> None:
    alibi("run", "figure-10", "--scale", "smoke", "--out", tmp_path)
    kinds = sorted(record.kind for record in records.find(tmp_path / "records"))
    assert kinds == ["evaluation", "paper-item", "training"]
    assert "Nonoverlapping and sliding windows" in (tmp_path / "figure-10.html").read_text()
    refused = alibi("run", "figure-1", "--set", "model.method=alibi", code=2)
    assert "compares several values of model.method" in refused


def test_generate_and_eval_use_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question of this café. " * 300)
    changes, out = ["--set", "data.tokenizer=bpe:280", "--set", "model.method=alibi"], tmp_path / "out"
    alibi("run", "--scale", "smoke", "--no-report", "--text", text, "--out", out, *changes)
    folder = next((out / "checkpoints" / "quick" / "alibi-16").iterdir())
    generated = alibi("generate", folder, "--prompt", "to be café", "--max-new-tokens", "30")
    assert generated.startswith("to be café")
    assert len(generated) > len("to be café") + 10
    alibi("eval", folder, "--text", text, "--lengths", "16", "--tokens", "32", "--out", tmp_path / "r")
    (record,) = records.find(tmp_path / "r")
    assert record.config["corpus"]["tokenizer"] == "bpe:280"
    assert record.config["corpus"]["valid_tokens"] < len(text.read_bytes())


def test_heads_shows_slope_half_life_and_vanishing_distance() -> None:
    output = alibi("heads", "slopes", "--heads", 8)
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 8
    assert rows[0] == ["1", "1/2", "1.4", "28"]
    assert rows[7] == ["8", "1/256", "177.4", "3,537"]


@pytest.mark.parametrize(("name", "start"), [("heads.png", b"\x89PNG"), ("heads.svg", b"<?xml")])
def test_heads_writes_a_picture_of_the_format_that_its_name_says(name: str, start: bytes, tmp_path: Path) -> None:
    picture = tmp_path / "new" / name
    alibi("heads", "slopes", "--heads", "3", "--picture", picture, "--length", "32")
    assert picture.read_bytes().startswith(start)
    assert os.listdir(picture.parent) == [name]


def test_version_and_help_load_no_framework() -> None:
    assert _alibi("--version").stdout.strip() == f"alibi-attn {alibi_attn.__version__}"
    code = (
        "import sys; from alibi_lab.cli.main import app; "
        "from typer.testing import CliRunner; result = CliRunner().invoke(app, ['run', '--help']); "
        "assert result.exit_code == 0 and 'train.steps=50' in result.output, result.output; "
        "loaded = {'torch', 'jax', 'matplotlib', 'accelerate', 'jinja2'} & set(sys.modules); "
        "sys.exit(str(loaded) if loaded else 0)"
    )
    printed("-c", code, COLUMNS="200")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "quik"], ["there is no recipe 'quik' (did you mean 'quick'?)"]),
        (["run", "--set", "train.stesp=5"], ["there is no field 'train.stesp' (did you mean 'train.steps'?)"]),
        (["run", "--set", "model.width=64"], ["there is no field 'model.width' (did you mean 'model.embed_dim'?)"]),
        (["run", "--set", "lr=1"], ["there is no field 'lr' (did you mean 'train.learning_rate'?)"]),
        (["run", "figure-3", "--methods", "alibi"], ["figure-3 does not compare position methods"]),
        (["config", "quik"], ["did you mean 'quick'?"]),
        (["run", "--set", "train.steps"], ["has no value", "--set train.steps=50"]),
        (["run", "--set", "train.steps=many"], ["train.steps is 'many' but must be a whole number"]),
        (["run", "--set", "train.length=0"], ["train.length is 0 but must be 1 or more"]),
        (["run", "--scale", "huge"], ["Invalid value for '--scale': 'huge' is not one of 'smoke'"]),
        (["run", "--seeds", "0,x"], ["--seeds is '0,x'"]),
        (["run", "--corpus", "pyton-source"], ["did you mean 'python-source'?"]),
        (["run", "--text", "a,b.txt"], ["has a comma in its name"]),
        (["run", "--text", "a.txt", "--corpus", "python-source"], ["are two texts to train on; pass one of them"]),
        (["heads", "slopes", "--heads", "0"], ["--heads"]),
        (["heads", "slopes", "--heads", "100000000"], ["--heads", "less than or equal to 4096"]),
        (["heads", "slopes", "--picture", "heads.jpg"], ["--picture is heads.jpg but must end in .png or .svg"]),
        (["heads", "summary"], ["MODEL"]),
        (["explain", "--kv-heads", "0"], ["--kv-heads"]),
        (["heads", "slopes", "--length", "100000000"], ["--length", "less than or equal to 1048576"]),
        (["hedas"], ["hedas", "heads"]),
        (["report"], ["paths"]),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    message = alibi(*arguments, code=2).lower()
    for word in words:
        assert word.lower() in message


def test_bad_input_ends_with_1_and_one_sentence(tmp_path: Path) -> None:
    """Two errors from different modules, in separate processes; the other errors are tested below in this process."""
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "out"
    for arguments, words in (
        (["run", "--text", "empty.txt", "--out", out], "error: empty.txt: there is no text inside (0 bytes)"),
        (["report", "nothing"], "does not exist; pass record files"),
    ):
        result = _alibi(*arguments, cwd=tmp_path)
        assert result.returncode == 1, result.stderr
        assert "Traceback" not in result.stderr
        assert words in " ".join(result.stderr.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "folder"], "no records"),
        (["run", "--out", "file"], "cannot be written"),
        (["run", "--out", "file/below"], "cannot be written"),
        (["run", "--text", "missing.txt"], "missing.txt does not exist"),
        (["run", "--text", "binary"], "binary file"),
        (["run", "--text", "short.txt"], "short"),
        (["heads", "slopes", "--picture", "folder"], "folder is a folder"),
        (["heads", "summary", "folder", "latin"], "latin is not UTF-8: byte 3 is invalid"),
        (["report", "bad", "--out", "x.html"], "not JSON"),
        (["generate", "folder", "--prompt", "a"], "holds no checkpoint"),
        (["explain", "--length", "8", "--device", "nowhere"], "device is 'nowhere' but"),
        (["explain", "--length", "999999999999"], "do not fit into memory; pass a smaller --length"),
    ],
)
def test_bad_input_is_reported_before_any_work(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("short " * 500)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    assert words in alibi(*arguments, code=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unexpected_error_keeps_its_traceback() -> None:
    code = (
        "import sys; sys.argv = ['alibi', 'heads', 'slopes']; from alibi_lab.cli import main; "
        "main.heads.head_rows = lambda heads: int('seven'); main.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ValueError: invalid literal for int()" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for a child process")
def test_an_interrupted_run_exits_with_130_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    changes = ["--set", "train.steps=100000", "--set", "model.method=alibi"]
    command = [*ALIBI, "run", "--scale", "smoke", "--out", str(tmp_path), *changes]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("checkpoints/*/*/*/step-*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint after a minute"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; run the same command again to resume" in stderr
    assert "train.steps=100000" in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(list(tmp_path.glob("checkpoints/*/*/*/step-*"))) == 1


def test_explain_reports_what_ranks_would_exchange() -> None:
    output = alibi("explain", "--length", "131072", "--ranks", "8")
    assert "17483" in output
    assert "1/60 of it" in output
    assert "±5" in output


def test_explain_reports_which_backends_can_run() -> None:
    output = alibi(*(arguments := ["explain", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--length", "64"]))
    for backend in ("reference", "dense"):
        assert backend in output
    assert output == alibi(*arguments)
