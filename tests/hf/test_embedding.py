"""Long embedding jobs: batches are sorted and bounded, vectors equal those of single texts, and jobs resume."""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from encoder_oracle import config, pooled, random_state, write_folder, write_tokenizer

from alibi_attn.hf.embedding import resumable_output
from alibi_attn.hf.embedding.embedding import batches, embed, fingerprint, longest_first, tokenize
from alibi_attn.hf.embedding.resumable_output import PartialVectors, claimed
from alibi_attn.hf.embedding.sentence_encoder import load

TEXTS = ["a b c", "d e f g h i j k a a b", "z", "a b c d e f g h i j k l m n o p", "b b"]


@pytest.fixture
def found(tmp_path):
    return load(write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina"))))


def test_batches_have_every_text_once_and_no_more_places_than_allowed():
    rows = [np.zeros(length, np.int32) for length in (3, 50, 1, 1, 7, 50, 2, 9, 1)]
    for most in (1, 7, 50, 101, 10_000):
        parts = list(batches(rows, longest_first(rows), most))
        assert sorted(at for part in parts for at in part) == list(range(len(rows)))
        assert all(len(part) * max(len(rows[at]) for at in part) <= most or len(part) == 1 for part in parts)
        lengths = [len(rows[at]) for part in parts for at in part]
        assert lengths == sorted(lengths, reverse=True)
    assert list(batches(rows, longest_first(rows), 10_000)) == [[1, 5, 7, 4, 0, 6, 2, 3, 8]]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_a_batch_are_those_of_the_formulas(pooling, found):
    rows, cut = tokenize(found.tokenizer, TEXTS, 100)
    assert cut == []
    vectors = embed(found.model, rows, pooling=pooling, normalize=False)
    assert vectors.dtype == np.float32
    wanted = torch.stack([pooled(random_state("jina"), "jina", text, pooling) for text in TEXTS]).numpy()
    assert np.abs(vectors - wanted).max() <= 3e-6 * np.abs(wanted).max()
    unit = embed(found.model, rows, pooling=pooling, normalize=True)
    assert np.allclose(unit, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=3e-6)


def test_long_texts_are_cut_and_counted(found):
    rows, cut = tokenize(found.tokenizer, TEXTS, 6)
    assert cut == [1, 3]
    assert [row.tolist() for row in rows][:3] == [[2, 5, 6, 7, 3], [2, 8, 9, 10, 11, 3], [2, 30, 3]]


def test_numbers_that_are_not_finite_are_an_error(found):
    with torch.no_grad():
        found.model.embeddings.word_embeddings.weight[7] = torch.nan
    rows, _ = tokenize(found.tokenizer, TEXTS, 100)
    assert np.isfinite(embed(found.model, rows[2:3], pooling="mean", normalize=False)).all()
    with pytest.raises(ValueError, match=r"not finite in torch\.float32"):
        embed(found.model, rows[:1], pooling="mean", normalize=False)


def test_a_batch_beyond_memory_is_one_sentence(found, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(type(found.model), "forward", full)
    with pytest.raises(ValueError, match="a batch of 1 × 9 tokens does not fit into memory"):
        embed(found.model, [np.zeros(9, np.int32)], pooling="mean", normalize=False)


def test_the_fingerprint_differs_with_weights_tokens_config_and_settings(found):
    rows, _ = tokenize(found.tokenizer, TEXTS, 100)
    first = fingerprint(found.model, rows, ["mean"])
    assert first == fingerprint(found.model, rows, ["mean"])
    others = {fingerprint(found.model, rows, ["cls"]), fingerprint(found.model, rows[::-1], ["mean"])}
    others.add(fingerprint(found.model, [np.concatenate(rows)], ["mean"]))
    found.model.config.gate_act = "relu"
    others.add(fingerprint(found.model, rows, ["mean"]))
    found.model.config.gate_act = "gelu"
    others.add(fingerprint(found.model.double(), rows, ["mean"]))
    found.model.float().embeddings.LayerNorm.bias.data[0] += 1
    others.add(fingerprint(found.model, rows, ["mean"]))
    assert len(others - {first}) == 6


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def started(out, rows, order=(0, 1, 2, 3)):
    """Partial results with some rows, in this order."""
    partial = PartialVectors.open(out, "q", order, 3)
    partial.put(ROWS[list(order)[:rows]])
    return partial


def test_rows_that_are_kept_are_there_after_an_interruption(tmp_path, monkeypatch):
    out = tmp_path / "vectors.npy"
    begun = started(out, 2, [2, 0, 1, 3])
    begun.keep()
    monkeypatch.setattr(resumable_output, "KEEP_SECONDS", 1e9)
    begun.put(ROWS[[1]])  # not kept: as if the process was killed
    assert not out.exists()
    resumed = PartialVectors.open(out, "q", [2, 0, 1, 3], 3)
    assert resumed.done == 2
    resumed.put(ROWS[[1, 3]])
    assert resumed.finish() == out
    assert np.array_equal(np.load(out), ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npy"]
    with pytest.raises(FileExistsError, match="never overwritten"):
        PartialVectors.open(out, "q", [2, 0, 1, 3], 3)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("v.partial.json", b"{"),
        ("v.partial.json", b"[]"),
        ("v.partial.json", b'{"identity": "q", "rows_done": 5}'),
        ("v.partial.json", b'{"identity": "q", "rows_done": -1}'),
        ("v.partial", b""),
        ("v.partial", b"\x93NUMPY"),
        ("v.partial", None),
    ],
)
def test_damaged_partial_results_are_one_sentence_and_never_filled_up(name, content, tmp_path):
    started(tmp_path / "v", 1)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-4] if content is None else content)
    with pytest.raises(ValueError, match=r"damaged; delete v\.partial and its \.json"):
        PartialVectors.open(tmp_path / "v", "q", range(4), 3)


@pytest.mark.parametrize("name", ["v.partial", "v.partial.json"])
def test_a_flipped_bit_in_partial_results_changes_no_vector(name, tmp_path):
    out, rng = tmp_path / "v", random.Random(0)
    started(out, 3, [3, 1, 0, 2]).keep()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    content = files[tmp_path / name]
    refused = 0
    for _ in range(200):
        at = rng.randrange(len(content))
        for path, sound in files.items():
            path.write_bytes(sound)
        (tmp_path / name).write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        try:
            resumed = PartialVectors.open(out, "q", [3, 1, 0, 2], 3)
        except (ValueError, FileExistsError):
            refused += 1
            continue
        resumed.put(ROWS[[2]])
        assert np.array_equal(np.load(resumed.finish()), ROWS)
        out.unlink()
    assert refused > 50


def test_other_files_next_to_the_output_stay(tmp_path):
    (tmp_path / "v.partial").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists without v\.partial\.json"):
        PartialVectors.open(tmp_path / "v", "q", range(4), 3)
    assert (tmp_path / "v.partial").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["v.partial"]


def test_an_output_that_came_meanwhile_is_not_overwritten(tmp_path):
    begun = started(tmp_path / "v", 4)
    (tmp_path / "v").write_text("theirs")
    with pytest.raises(FileExistsError, match="never overwritten"):
        begun.finish()
    assert (tmp_path / "v").read_text() == "theirs"


@pytest.mark.parametrize("left", [("v.partial", "v.partial.json"), ("v.partial",)])
def test_files_of_a_run_that_was_killed_at_its_end_are_removed(left, tmp_path):
    out = tmp_path / "v"
    started(out, 4).keep()
    os.link(tmp_path / "v.partial", out)
    for name in {"v.partial", "v.partial.json"} - set(left):
        (tmp_path / name).unlink()
    with pytest.raises(FileExistsError, match="never overwritten"), claimed(out):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["v"]
    assert np.array_equal(np.load(out), ROWS)


def test_an_empty_file_that_a_killed_run_left_is_no_obstacle(tmp_path):
    (tmp_path / "v.partial").touch()
    with claimed(tmp_path / "v"):
        assert PartialVectors.open(tmp_path / "v", "q", range(4), 3).done == 0


def test_a_process_killed_while_it_notes_its_progress_leaves_nothing_for_good(tmp_path):
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from alibi_attn.hf.embedding.resumable_output import PartialVectors
        partial = PartialVectors.open(Path(sys.argv[1]), "question", range(2), 3)
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        partial.keep()
    """
    out = tmp_path / "vectors.npy"
    killed = subprocess.run([sys.executable, "-c", program, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3
    partial = PartialVectors.open(out, "question", range(2), 3)
    partial.put(np.ones((2, 3), np.float32))
    partial.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npy"]
