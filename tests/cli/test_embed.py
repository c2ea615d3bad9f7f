"""`alibi embed`: rows are the texts in their order, an interruption loses nothing, and every refusal is a sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_oracle import config, pooled, random_state, write_folder, write_tokenizer
from typer.testing import CliRunner

from alibi_attn.cli.main import app
from alibi_attn.hf import embedding

TEXTS = ["a b c", "d e f g h i j k a a b", "z", "a b c d e f g h i j k l m n o p"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{at}.txt" for at in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text + "\n", encoding="utf-8")
    return paths


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["embed", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.stdout.split()) if code != 1 else str(result.exception)


def wanted() -> np.ndarray:
    return torch.stack([pooled(random_state("jina"), "jina", text) for text in TEXTS]).numpy()


def test_every_file_or_every_line_is_a_row_in_its_order(model, files, tmp_path):
    out = tmp_path / "new" / "vectors.npy"
    assert run(model, *files, "--out", out) == f"vectors {out} 4 × 48 (39 tokens)"
    found = np.load(out)
    assert found.dtype == np.float32
    assert np.abs(found - wanted()).max() <= 3e-6 * np.abs(wanted()).max()

    (tmp_path / "lines.txt").write_bytes("\ufeff".encode() + "\r\n".join(TEXTS).encode())
    run(
        model,
        tmp_path / "lines.txt",
        files[0],
        "--lines",
        "--normalize",
        "--batch-tokens",
        20,
        "--out",
        tmp_path / "lines",
    )
    again = np.load(tmp_path / "lines")
    units = wanted() / np.linalg.norm(wanted(), axis=1, keepdims=True)
    assert np.allclose(again, units[[0, 1, 2, 3, 0]], atol=3e-6)

    said = run(model, *files, "--max-length", 6, "--dtype", "bfloat16", "--out", tmp_path / "cut")
    assert said.endswith("(20 tokens, 2 cut to 6)")
    assert np.allclose(np.load(tmp_path / "cut")[[0, 2]], wanted()[[0, 2]], atol=0.1)
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_an_interrupted_run_goes_on_with_what_is_left(model, files, tmp_path, monkeypatch):
    made, whole = embedding.embed, []

    def stops(encoder, rows, **options):
        if len(whole) == 2:
            raise KeyboardInterrupt
        whole.append(len(rows))
        return made(encoder, rows, **options)

    out, arguments = tmp_path / "v.npy", [model, *files, "--batch-tokens", 20, "--out", tmp_path / "v.npy"]
    monkeypatch.setattr(embedding, "embed", stops)
    run(*arguments, code=130)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v.npy.partial", "v.npy.partial.json"]
    monkeypatch.setattr(embedding, "embed", lambda *a, **k: whole.append(len(a[1])) or made(*a, **k))
    assert "was begun with another model" in run(*arguments, "--normalize", code=1)
    arguments[-3] = 10_000  # other batches answer the same question
    assert run(*arguments).startswith("going on with 2 of 4 texts vectors")
    assert whole == [1, 1, 2]
    assert np.abs(np.load(out) - wanted()).max() <= 3e-6 * np.abs(wanted()).max()


REFUSED = [
    ("empty", b"", [], "is empty; pass files with text"),
    ("blank", b" \n\t\n", [], "is empty; pass files with text"),
    ("binary", b"a\0b", [], "is a binary file"),
    ("latin", b"caf\xe9", [], "is not UTF-8: byte 3"),
    ("gap", b"a\n\nb\n", ["--lines"], "has no text in line 2"),
    ("long", b"a " * 30, ["--batch-tokens", "20"], "has 32 tokens and a batch may have 20"),
    ("short", b"a", ["--max-length", "2"], "max_seq_length is 2 but must be at least 3"),
    ("device", b"a", ["--device", "nowhere"], "device is 'nowhere' but it cannot be used here"),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), REFUSED)
def test_what_is_no_text_or_does_not_fit_is_refused_and_nothing_written(
    name, content, options, message, model, tmp_path
):
    path = tmp_path / name
    path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert message in run(model, path, *options, "--out", tmp_path / "v.npy", code=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_files_and_folders_that_are_not_there_are_refused(model, files, tmp_path):
    out = tmp_path / "v.npy"
    assert "pass the folder of a checkpoint" in run(tmp_path / "gone", files[0], "--out", out, code=1)
    assert "is a folder; pass files of text" in run(model, model, "--out", out, code=1)
    assert "No such file" in run(model, tmp_path / "gone", "--out", out, code=1)
    assert "config.json is not there" in run(tmp_path, files[0], "--out", out, code=1)
    assert "is a folder; pass the name of a file" in run(model, files[0], "--out", tmp_path, code=1)
    assert "cannot be written (it is a file)" in run(model, files[0], "--out", files[0] / "v.npy", code=1)
    assert "never overwritten" in run(model, files[0], "--out", files[1], code=1)
    assert files[1].read_text() == TEXTS[1] + "\n"


def test_a_folder_that_asks_for_a_prompt_is_sent_elsewhere(model, files, tmp_path):
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"q": "a "}, "default_prompt_name": "q"}')
    assert "use alibi_attn.hf.sentence_transformer" in run(model, files[0], "--out", tmp_path / "v.npy", code=1)
