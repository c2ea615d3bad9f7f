"""`alibi bench late-chunking` compares blocks of tokens with an undivided pass and keeps a record. Durations are not tested."""

import pytest

from alibi_attn.hf.readers.encoder import layers
from alibi_lab import records
from alibi_lab.measure import long_document as module
from alibi_lab.measure.long_document import long_document, random_document
from alibi_lab.measure.peers.dense_encoder import Sizes

OPTIONS = {
    "tokens": 150,
    "checked": 70,
    "chunk": 32,
    "sizes": Sizes(layers=2, width=48, heads=6, inner=40, vocabulary=50),
    "say": lambda _: None,
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(layers, "ROWS", 16)


def test_chunks_cover_the_document_once():
    spans = random_document(70, 32, 50).tokens
    assert spans.tolist() == [[0, 32], [32, 64], [64, 70]]
    assert random_document(64, 32, 50).tokens.tolist() == [[0, 32], [32, 64]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_record_has_time_memory_and_the_error(dtype, tmp_path):
    (path,) = long_document(tmp_path, dtype=dtype, **OPTIONS)
    record = records.load(path)
    assert record.curves["ours"]["length"] == [150]
    assert record.curves["ours"]["forward_ms"][0] > 0
    assert 0 <= record.metrics["error_against_undivided"] <= module.MOST_ERROR[dtype]
    with pytest.raises(FileExistsError, match="never overwritten"):
        long_document(tmp_path, dtype=dtype, **OPTIONS)


def test_blocks_that_change_the_vectors_are_not_timed(tmp_path, monkeypatch):
    real = layers.ALiBiBertMLP._inner
    monkeypatch.setattr(
        layers.ALiBiBertMLP, "_inner", lambda self, x: real(self, x) * (1.01 if x[..., 0].numel() <= 16 else 1)
    )
    with pytest.raises(RuntimeError, match="differ by"):
        long_document(tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype is 'int8' but must be 'float32' or 'bfloat16'"):
        long_document(tmp_path, dtype="int8", **OPTIONS)
