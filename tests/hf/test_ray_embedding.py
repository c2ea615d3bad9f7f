"""Embedding on a Ray cluster: the vectors of one process, in parts that survive killed workers and second starts."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from encoder_oracle import config, random_state, write_folder, write_tokenizer

from alibi_attn.hf import late_chunks

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default:.*deprecated:DeprecationWarning:ray")]
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
LINES = [" ".join("abcdefghijklmnop"[at % 13 : at % 13 + 1 + at % 4]) for at in range(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "jina"
    return write_tokenizer(write_folder(folder, random_state("jina"), config("jina")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(ENVIRONMENT)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def settings(model):
    from alibi_attn.hf.embedding.job import Settings

    return Settings(str(model), None, None, 512, 16384, False, "float32", "cpu")


def texts_of(lines):
    from alibi_attn.hf.embedding.ray_embedding import Texts

    return Texts(["lines.txt"] * len(lines), [0] * len(lines), list(lines))


def rows_of(folder: Path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(folder).to_pylist()


def holding_work(parent: int) -> Iterator[psutil.Process]:
    """The workers that are embedding a shard at this moment; Ray writes a process's task into its command line."""
    for child in psutil.Process(parent).children(recursive=True):
        try:
            name = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "_Worker" in name and "submit" in name:
            yield child


def test_a_shard_ends_at_the_text_that_reaches_its_size():
    from alibi_attn.hf.embedding import ray_embedding

    shards = ray_embedding.split(texts_of(["to", "be", "or", "not", "to"]), 4)
    assert [shard.texts for shard in shards] == [["to", "be"], ["or", "not"], ["to"]]


def test_a_worker_killed_while_it_holds_work_changes_nothing(model, tmp_path):
    words = ["".join(chr(97 + (at * step) % 26) for step in range(90)) for at in range(40_000)]
    lines = [" ".join([LINES[at % 90], *words[at : at + 3]]) for at in range(0, 40_000, 3)]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    program = [sys.executable, "-m", "alibi_attn", "embed", str(model), "lines.txt", "--lines", "--out"]
    environment = {**os.environ, **ENVIRONMENT}
    undisturbed = subprocess.run([*program, "one.npy"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert undisturbed.returncode == 0, undisturbed.stderr
    command = [*program, "parts", "--ray", "local", "--workers", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        killed = None
        while process.poll() is None and killed is None:
            killed = next(holding_work(process.pid), None)
            time.sleep(0.01)
        assert killed is not None
        killed.kill()
        out, _ = process.communicate()
    assert process.returncode == 0
    assert out.splitlines()[-1] == "vectors  parts  13,334 × 48  (4 files, 100,003 tokens computed)"
    rows, vectors = rows_of(tmp_path / "parts"), np.load(tmp_path / "one.npy")
    assert [row["text"] for row in rows] == lines
    content = (tmp_path / "lines.txt").read_text()
    assert all(content[row["start"] : row["end"]] == row["text"] for row in rows)
    assert np.abs(np.array([row["vector"] for row in rows]) - vectors).max() <= 3e-6 * np.abs(vectors).max()


def test_a_second_start_computes_only_the_missing_parts(cluster, settings, tmp_path):
    from alibi_attn.hf.embedding import ray_embedding

    out, seen = tmp_path / "new" / "parts", []

    def embed(lines=LINES, settings=settings, **options):
        return ray_embedding.embed(texts_of(lines), settings, out, shard_characters=100, **options)

    made = embed(workers=2)
    assert (made.rows, made.width, len(made.parts)) == (90, 48, len(list(out.glob("part-*.parquet"))))
    before = {path: path.read_bytes() for path in made.parts}
    made.parts[1].unlink()
    again = embed(on_resume=lambda *counts: seen.append(counts), on_shard=lambda *counts: seen.append(counts))
    assert seen == [(len(before) - 1, len(before)), (len(before), len(before))]
    assert 0 < again.tokens < made.tokens / 3
    assert {path: path.read_bytes() for path in again.parts} == before
    assert embed().tokens == 0

    with pytest.raises(FileExistsError, match="was made with another model, other texts or other settings"):
        embed(settings=dataclasses.replace(settings, normalize=True))
    with pytest.raises(FileExistsError, match="was made with another model, other texts or other settings"):
        embed(["z", *LINES[1:]])
    with pytest.raises(FileExistsError, match="is a part of a run with more texts"):
        embed(LINES[:40])
    made.parts[2].write_bytes(before[made.parts[2]][:-9])
    with pytest.raises(ValueError, match=r"part-000002.parquet is damaged; delete it"):
        embed()
    assert sorted(out.glob("part-*")) == made.parts


def test_chunks_on_a_cluster_are_those_of_one_process(cluster, settings, tmp_path):
    from alibi_attn.hf.embedding import ray_embedding

    documents = [" ".join(LINES[at : at + 20]) for at in range(0, 80, 20)]
    some = dataclasses.replace(settings, chunks=7, max_length=30, overlap=4, normalize=True)
    ray_embedding.embed(texts_of(documents), some, tmp_path / "parts", shard_characters=200)
    rows = rows_of(tmp_path / "parts")
    expected = late_chunks(settings.model, documents, chunks=7, max_length=30, overlap=4, normalize=True)
    assert [[row["start"], row["end"]] for row in rows] == np.concatenate([one.spans for one in expected]).tolist()
    vectors = np.concatenate([one.vectors for one in expected])
    assert np.abs(np.array([row["vector"] for row in rows]) - vectors).max() <= 3e-6


def test_a_second_writer_is_refused_and_leaves_the_folder_of_the_first(tmp_path, monkeypatch):
    from alibi_attn.hf.embedding import ray_embedding

    out, exists = tmp_path / "parts", Path.exists
    with ray_embedding._claimed(out):
        monkeypatch.setattr(Path, "exists", lambda path: path != out and exists(path))  # as if both began at once
        with pytest.raises(FileExistsError, match="another process is writing"), ray_embedding._claimed(out):
            pass
        monkeypatch.undo()
        assert (out / ".lock").exists()
    assert not out.exists()


def test_what_cannot_run_is_refused_and_leaves_no_folder(cluster, settings, tmp_path):
    from alibi_attn.hf.embedding import ray_embedding

    def message(lines=LINES, workers=None, **changes):
        changed = dataclasses.replace(settings, **changes)
        with pytest.raises((ValueError, OSError)) as caught:
            ray_embedding.embed(texts_of(lines), changed, tmp_path / "new" / "parts", workers=workers)
        return str(caught.value)

    assert "workers is 3 but the cluster has 2 processors" in message(workers=3)
    assert "the cluster has 0 GPUs" in message(device="cuda")
    assert "a text may have 60 tokens but a batch holds 50" in message(max_length=60, batch_tokens=50)
    assert "with an overlap of 9, but a window must have room" in message(chunks=5, max_length=9, overlap=9)
    assert "config.json does not exist" in message(model=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_texts_that_killed_their_workers_are_named_instead_of_tried_forever(cluster, settings):
    from alibi_attn.hf.embedding import ray_embedding

    attempts = ray.remote(ray_embedding._Attempts).remote()
    worker = ray_embedding._Worker(
        settings, ray_embedding._identity(ray_embedding._loaded(settings), settings), 1, attempts
    )
    files, texts = (np.array([values], dtype=object) for values in (["a.txt", "b.txt"], ["a b", "c"]))
    batch = {"number": np.array([7]), "identity": np.array(["x"]), "files": files, "starts": [[0, 0]], "texts": texts}
    for _ in range(ray_embedding.ATTEMPTS):  # as many workers began it and died
        result = worker(batch)
        assert result["error"] == [""]
        assert result["tokens"] == [4 + 3]
    [error] = worker(batch)["error"]
    assert error.startswith(
        "part 7, texts of a.txt and others, killed its worker 4 times, most likely because memory ran out"
    )
