"""`alibi embed`: row order, resuming after an interruption, and one-sentence errors."""

import resource
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import alibi
from encoder_oracle import config, pooled, random_state, write_folder, write_tokenizer
from typer.testing import CliRunner

from alibi_attn.hf import late_chunks
from alibi_attn.hf.embedding import embedding, sentence_encoder
from alibi_lab.cli.main import app

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
    return " ".join(alibi("embed", *arguments, code=code).split())


def expected() -> np.ndarray:
    return torch.stack([pooled(random_state("jina"), "jina", text) for text in TEXTS]).numpy()


def test_rows_are_the_files_or_lines_in_order(model, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "new" / "vectors.npy"
    assert run(model, *files, "--out", out) == f"vectors {out} 4 × 48 (39 tokens)"
    vectors = np.load(out)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - expected()).max() <= 3e-6 * np.abs(expected()).max()

    (tmp_path / "lines.txt").write_bytes("\ufeff".encode() + "\r\n".join(TEXTS).encode())
    options = ["--lines", "--normalize", "--batch-tokens", 20, "--out", tmp_path / "lines"]
    run(model, tmp_path / "lines.txt", files[0], *options)
    again = np.load(tmp_path / "lines")
    units = expected() / np.linalg.norm(expected(), axis=1, keepdims=True)
    assert np.allclose(again, units[[0, 1, 2, 3, 0]], atol=3e-6)

    with monkeypatch.context() as patched:
        patched.setattr(embedding, "embed", lambda *_args, **_options: 1 / 0)  # the warning comes before the work
        cut = CliRunner().invoke(app, ["embed", str(model), *map(str, files), "--max-length", "6", "--out", "never"])
    warning = "warning: 2 of 4 texts have more than 6 tokens and are cut; pass --max-length"
    assert isinstance(cut.exception, ZeroDivisionError)
    assert warning in " ".join(cut.stderr.split())
    message = run(model, *files, "--max-length", 6, "--dtype", "bfloat16", "--out", tmp_path / "cut")
    assert message.endswith("(20 tokens, 2 cut to 6)")
    assert np.allclose(np.load(tmp_path / "cut")[[0, 2]], expected()[[0, 2]], atol=0.1)
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_an_interrupted_run_resumes_with_the_remaining_texts(model, files, tmp_path, monkeypatch):
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
    assert "was started with another model" in run(*arguments, "--normalize", code=1)
    arguments[-3] = 10_000  # the batch size may change: it does not change the vectors
    assert run(*arguments).startswith("resuming: 2 of 4 texts are left vectors")
    assert whole == [1, 1, 2]
    assert np.abs(np.load(out) - expected()).max() <= 3e-6 * np.abs(expected()).max()


TABLE = ["--out", "v.parquet"]
PARTS = ["--out", "parts"]
REFUSED = [
    (b"", [], "is empty; pass files with text"),
    (b" \n\t\n", [], "is empty; pass files with text"),
    (b"a\0b", [], "is a binary file"),
    (b"caf\xe9", [], "is not UTF-8: byte 3"),
    (b"a\n\nb\n", ["--lines"], "has no text in line 2"),
    (b"a " * 30, ["--batch-tokens", "20"], "has 32 tokens but a batch holds 20"),
    (b"a", ["--max-length", "2"], "max_seq_length is 2 but must be at least 3"),
    (b"a", ["--overlap", "2"], "--overlap is for the windows of --chunks"),
    (b"a", [*TABLE, "--chunks", "words"], "must be a number of tokens, sentences or paragraphs"),
    (b"a", [*TABLE, "--chunks", "0"], "must be a number of tokens, sentences or paragraphs"),
    (b"a", [*TABLE, "--chunks", "9", "--lines"], "divides whole files; omit --lines"),
    (b"a", ["--chunks", "9", "--out", "v.npy"], "pass a name that ends in .parquet instead of v.npy"),
    (b"a", ["--out", "v2.parquet"], "is a Parquet table, which needs --chunks"),
    (b"a", ["--out", "v2.csv"], "pass a name that ends in .npy instead of v2.csv"),
    (b"a", [*PARTS, "--ray", "here"], "--ray is 'here'; pass local, auto, or an address such as 10.0.0.1:6379"),
    (b"a", ["--ray", "local", "--out", "v.npy"], "--ray writes a folder of Parquet files; pass a name without .npy"),
    (b"a", [*PARTS, "--ray", "local", "--device", "cuda:1"], "Ray gives each worker a device"),
    (b"a", [*PARTS, "--ray", "local", "--chunks", "words"], "must be a number of tokens, sentences or paragraphs"),
    (b"a", [*PARTS, "--workers", "2"], "--workers is for --ray"),
]


@pytest.mark.parametrize(("content", "options", "message"), REFUSED)
def test_bad_texts_and_options_are_refused_and_nothing_is_written(
    content, options, message, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert message in run(model, "text", "--out", "new/v.npy", *options, code=1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "gpu"], "device is 'gpu' but must be a device of torch, such as"),
        (["--device", "privateuseone"], "device is 'privateuseone' but it cannot be used here"),
        (["--device", "meta", "--dtype", "int8"], "int8 needs an x86 processor with VNNI instructions"),
        (["--device", "cpu", "--dtype", "float8"], "float8 needs an NVIDIA GPU of compute capability 8.9 or later"),
    ],
)
def test_a_wrong_device_is_reported_before_the_model_is_loaded(options, message, model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "load", None)
    assert message in run(model, files[0], *options, "--out", tmp_path / "v.npy", code=1)


def test_a_missing_pyarrow_is_reported_before_the_model_is_loaded(model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "load", None)
    monkeypatch.delattr("alibi_attn.hf.embedding.chunk_table", raising=False)
    monkeypatch.delitem(sys.modules, "alibi_attn.hf.embedding.chunk_table", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arguments = ["embed", model, files[0], "--chunks", 2, "--out", tmp_path / "v.parquet"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert 'this command needs pyarrow; install it with: pip install ".[index]" in a clone' in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize("options", [[], ["--ray", "local"]])
def test_windows_is_refused_before_the_model_is_loaded(options, model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sentence_encoder, "load", lambda *_, **__: pytest.fail("loaded"))
    assert "use sentence_transformer in Python, or WSL" in run(model, *files, *options, "--out", tmp_path / "v", code=1)


def test_missing_files_and_wrong_folders_are_refused(model, files, tmp_path):
    out = tmp_path / "v.npy"
    assert "pass the folder of a checkpoint" in run(tmp_path / "gone", files[0], "--out", out, code=1)
    assert "is a folder; pass text files" in run(model, model, "--out", out, code=1)
    assert "No such file" in run(model, tmp_path / "gone", "--out", out, code=1)
    assert "config.json does not exist" in run(tmp_path, files[0], "--out", out, code=1)
    assert "is a folder; pass the name of a file" in run(model, files[0], "--out", tmp_path, code=1)
    assert "cannot be written (it is a file)" in run(model, files[0], "--out", files[0] / "v.npy", code=1)
    out.write_text("something else")
    assert "never overwritten" in run(model, files[0], "--out", out, code=1)
    assert out.read_text() == "something else"


def test_a_model_that_needs_a_prompt_is_refused_with_the_function_to_use(model, files, tmp_path):
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"q": "a "}, "default_prompt_name": "q"}')
    assert "use alibi_attn.hf.sentence_transformer" in run(model, files[0], "--out", tmp_path / "v.npy", code=1)


def test_a_second_run_with_the_same_output_is_refused_and_disturbs_nothing(model, files, tmp_path, monkeypatch):
    made, refusals = embedding.embed, []

    def embeds(*arguments, **options):
        if not refusals:
            refusals.append(run(model, *files[:2], "--out", tmp_path / "v.npy", code=1))
        return made(*arguments, **options)

    monkeypatch.setattr(embedding, "embed", embeds)
    run(model, *files, "--out", tmp_path / "v.npy")
    assert refusals == [
        f"another process is writing {tmp_path / 'v.npy'} (v.npy.partial is locked); wait for it, or pass another --out"
    ]
    assert np.abs(np.load(tmp_path / "v.npy") - expected()).max() <= 3e-6 * np.abs(expected()).max()
    assert [path.name for path in tmp_path.glob("v.npy*")] == ["v.npy"]


@pytest.mark.parametrize("link", ["v.npy", "folder"])
def test_a_dangling_link_is_refused_before_any_work(link, model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "tokenize", None)
    (tmp_path / link).symlink_to(tmp_path / "gone" / "nowhere")
    out = tmp_path / link if link == "v.npy" else tmp_path / link / "v.npy"
    assert "nowhere, which does not exist; pass another path" in run(model, files[0], "--out", out, code=1)


def test_a_folder_that_cannot_be_written_or_locked_is_refused_before_any_work(model, files, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "tokenize", None)
    long = tmp_path / ("v" * 250)
    assert "File name too long" in run(model, files[0], "--out", long, code=1)
    assert "cannot be written" in run(model, files[0], "--out", "/proc/self/v.npy", code=1)
    (tmp_path / "v.npy.partial").mkdir()
    assert "Is a directory" in run(model, files[0], "--out", tmp_path / "v.npy", code=1)


def passages(path: Path) -> list[dict]:
    return (
        pytest.importorskip("pyarrow.parquet", reason="the extra index is not installed").read_table(path).to_pylist()
    )


def test_chunks_are_rows_of_a_table_with_their_file_place_text_and_vector(model, files, tmp_path):
    pytest.importorskip("pyarrow", reason="the extra index is not installed")
    out = tmp_path / "passages.parquet"
    files[0].write_text("a b c. d e.\n\nf g", encoding="utf-8")
    assert run(model, *files, "--chunks", "sentences", "--out", out) == f"vectors {out} 6 × 48 (4 files, 45 tokens)"
    rows = passages(out)
    assert [row["text"] for row in rows] == ["a b c.", "d e.", "f g", *TEXTS[1:]]
    assert [Path(row["file"]).name for row in rows] == ["0.txt", "0.txt", "0.txt", "1.txt", "2.txt", "3.txt"]
    texts = [path.read_text() for path in files]
    expected = late_chunks(model, texts, chunks="sentences")
    assert np.array_equal([row["vector"] for row in rows], np.concatenate([found.vectors for found in expected]))
    assert [[row["start"], row["end"]] for row in rows] == np.concatenate([found.spans for found in expected]).tolist()
    options = ["--chunks", 3, "--max-length", 8, "--overlap", 2, "--normalize", "--batch-tokens", 9]
    run(model, *files, *options, "--out", tmp_path / "windows.parquet")
    expected = late_chunks(model, texts, chunks=3, max_length=8, overlap=2, normalize=True, batch_tokens=9)
    vectors = [row["vector"] for row in passages(tmp_path / "windows.parquet")]
    assert np.array_equal(vectors, np.concatenate([found.vectors for found in expected]))
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_interrupted_chunks_resume_with_the_same_table(model, files, tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra index is not installed")
    made, batches = embedding.hidden_states, []

    def stops(encoder, rows):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(len(rows))
        return made(encoder, rows)

    out = tmp_path / "v.parquet"
    arguments = [model, *files, "--chunks", 2, "--batch-tokens", 8, "--out", out]
    monkeypatch.setattr(embedding, "hidden_states", stops)
    run(*arguments, code=130)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v.parquet.partial", "v.parquet.partial.json"]
    monkeypatch.setattr(embedding, "hidden_states", made)
    assert "was started with another model" in run(
        *arguments[:-4], "--batch-tokens", 8, "--out", out, "--overlap", 1, code=1
    )

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    assert "No space left" in run(*arguments, code=1)
    monkeypatch.undo()
    assert run(*arguments).startswith("resuming: 0 of 17 chunks are left")  # only the table was missing
    whole = tmp_path / "whole.parquet"
    run(*arguments[:-1], whole)
    assert whole.read_bytes() == out.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v.parquet"]


def test_flipped_bits_in_the_pages_of_a_table_are_noticed(model, files, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra index is not installed")
    from alibi_attn.hf.embedding import chunk_table

    out = tmp_path / "v.parquet"
    run(model, *files, "--chunks", 2, "--out", out)
    content, rows = out.read_bytes(), pq.read_table(out)
    footer, refused = len(content) - 8 - int.from_bytes(content[-8:-4], "little"), 0
    for at in range(4, footer, 61):
        out.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            chunk_table.read_metadata(out)
        except ValueError:
            refused += 1
        else:
            assert pq.read_table(out).equals(rows)  # in a header, where it means nothing
    assert refused > 40


def test_a_full_disk_is_one_sentence_and_loses_no_finished_vector(model, files, tmp_path):
    """A limit of file sizes makes writes fail as a full disk does, at the start and at the end of the work."""
    pytest.importorskip("pyarrow.parquet", reason="the extra index is not installed")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited(limit, *arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            return run(*arguments, code=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    chunks = [model, *files, "--chunks", 2, "--out", tmp_path / "v.parquet"]
    large = "File too large"
    vectors = 128 + 17 * 48 * 4  # the partial file of 17 chunks; the table is larger
    try:
        assert large in limited(vectors - 1, *chunks)
        assert not list(tmp_path.glob("v*"))
        assert large in limited(vectors, *chunks)
    finally:
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v.parquet.partial", "v.parquet.partial.json"]
    assert run(*chunks).startswith("resuming: 0 of 17 chunks are left")
