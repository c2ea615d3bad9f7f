"""`alibi bench embedding` compares before it times and keeps both records. Durations are not tested."""

import pytest
import torch

from alibi_attn import records
from alibi_attn.measure import embedding as module
from alibi_attn.measure import timing
from alibi_attn.measure.embedding import BERT, ORIGINAL, OURS, SDPA, embedding
from alibi_attn.measure.peers.dense_encoder import DenseEncoder, Sizes
from alibi_attn.report.page import report_html
from alibi_attn.report.plots.benchmark import facts, is_drawn, ratio_table

OPTIONS = {
    "lengths": (40, 20),
    "mixed": (30, 12, 1),
    "sizes": Sizes(layers=2, width=48, heads=6, inner=40, vocabulary=50),
    "checked": ((33,), (20, 9, 1)),
    "repeats": 2,
    "seconds": 0.1,
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))


def test_single_texts_and_a_mixed_batch_are_measured_and_drawn(tmp_path):
    messages = []
    paths = embedding(tmp_path, say=messages.append, **OPTIONS)
    texts, mixed = map(records.load, paths)
    assert [texts.name, mixed.name] == ["embedding/texts", "embedding/mixed"]
    assert len(messages) == 2 + 4 * 3
    assert texts.curves[OURS]["length"] == [20, 40]
    assert (mixed.curves[OURS]["length"], mixed.curves[OURS]["tokens"]) == ([30], [43])
    for record in (texts, mixed):
        assert set(record.curves) == {OURS, ORIGINAL, SDPA, BERT}
        assert is_drawn(record)
        for curve in record.curves.values():
            assert all(ms > 0 for ms in curve["forward_ms"])
            assert all(0 < share < 1 for share in curve["attention_share"])
        assert record.metrics["error_against_original"] < 1e-5
        assert record.metrics["error_against_sdpa_dense_bias"] < 1e-5
        assert next(name for name, _ in ratio_table(record)[1]).startswith(OURS)
    assert {"speedup_over_original_40", "speedup_over_bert_no_bias_20", "attention_share_40"} <= set(texts.metrics)
    assert "embedding/mixed" in report_html([texts, mixed])
    with pytest.raises(FileExistsError, match="never overwritten"):
        embedding(tmp_path, **OPTIONS)


def test_a_model_that_computes_something_else_is_not_timed(tmp_path):
    def shifted(sizes):
        model = module.our_encoder(sizes)
        model.register_forward_hook(
            lambda _, inputs, found: type(found)(last_hidden_state=found.last_hidden_state.roll(1, dims=1))
        )
        return model

    with pytest.raises(RuntimeError, match="ours is off by"):
        embedding(tmp_path, build=shifted, say=lambda _: None, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_sizes_that_may_not_fit_are_skipped_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "available_bytes", lambda: timing.SPARE_BYTES + 100)
    messages = []
    texts, _ = map(records.load, embedding(tmp_path, say=messages.append, **OPTIONS))
    assert texts.curves[ORIGINAL]["forward_ms"] == [None, None]
    assert all(ms > 0 for ms in texts.curves[BERT]["forward_ms"])
    assert any("it may need 0 GiB" in words for _, words in facts(texts) if "GiB" in words)
    assert "speedup_over_original_40" not in texts.metrics
    assert sum("skipped" in line for line in messages) == 2 * 3


def test_the_weights_of_ours_are_all_taken_by_the_dense_peer():
    sizes = OPTIONS["sizes"]
    ours = module.our_encoder(sizes)
    peer = DenseEncoder(sizes, 8, eager=True)
    assert sum(x.numel() for x in peer.parameters()) == sum(x.numel() for x in ours.parameters())
    peer.take(ours.state_dict())
    state = ours.state_dict()
    state.pop("encoder.layer.1.mlp.wo.bias")
    with pytest.raises(RuntimeError, match="Missing key"):
        peer.take(state)
    assert torch.equal(peer.layers[0].attention.key.weight, ours.encoder.layer[0].attention.self.Wqkv.weight[48:96])
