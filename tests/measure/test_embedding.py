"""`alibi bench embedding` compares before it times and keeps both records. Durations are not tested."""

import pytest
import torch

from alibi_lab import records
from alibi_lab.measure import embedding as module
from alibi_lab.measure import embedding_peers, timing
from alibi_lab.measure.embedding import embedding
from alibi_lab.measure.embedding_peers import (
    BERT,
    ENCODERS,
    LLAMA,
    ONNX,
    ORIGINAL,
    OURS,
    SDPA,
    Place,
    inputs,
    our_encoder,
)
from alibi_lab.measure.passage_search import supports_int8
from alibi_lab.measure.peers import llama_encoder
from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes
from alibi_lab.report.page import report_html
from alibi_lab.report.plots.benchmark import facts, is_drawn, ratio_table

OPTIONS = {
    "lengths": (40, 20),
    "mixed": (30, 12, 1),
    "sizes": Sizes(layers=2, width=64, heads=4, inner=64, vocabulary=50),
    "checked": ((33,), (20, 9, 1)),
    "precisions": ("float32",),
    "rounds": 2,
    "repeats": 1,
    "seconds": 0.1,
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Everything runs in this process, without the programs that few have."""
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(module, "why_not", lambda name: "left out" if ENCODERS[name].needs else None)


def test_single_texts_and_a_mixed_batch_are_measured_and_drawn(tmp_path):
    messages = []
    paths = embedding(tmp_path, say=messages.append, **OPTIONS)
    texts, mixed = map(records.load, paths)
    assert [texts.name, mixed.name] == ["embedding/texts/float32", "embedding/mixed/float32"]
    assert sum("left out" in line for line in messages) == 3
    assert len(messages) == 3 + 2 + 4 * 3 + 2
    assert texts.curves[OURS]["length"] == [20, 40]
    assert (mixed.curves[OURS]["length"], mixed.curves[OURS]["tokens"]) == ([30], [43])
    for record in (texts, mixed):
        assert set(record.curves) == {OURS, ORIGINAL, SDPA, BERT}
        assert is_drawn(record)
        for curve in record.curves.values():
            assert all(ms > 0 for ms in curve["forward_ms"])
            assert all(0 < share < 1 for share in curve["attention_share"])
        assert record.metrics["error_of_original"] < 1e-5
        assert record.metrics["error_of_sdpa_dense_bias"] < 1e-5
        assert next(name for name, _ in ratio_table(record)[1]).startswith(OURS)
    assert {"speedup_over_original_40", "speedup_over_bert_no_bias_20", "attention_share_40"} <= set(texts.metrics)
    assert "embedding/mixed/float32" in report_html([texts, mixed])
    with pytest.raises(FileExistsError, match="never overwritten"):
        embedding(tmp_path, **OPTIONS)


@pytest.mark.skipif(not supports_int8(), reason="this processor has no exact int8 products")
def test_a_peer_is_compared_with_ours_in_the_same_precision(tmp_path):
    options = {**OPTIONS, "lengths": (20,), "precisions": ("float32", "bfloat16", "int8")}
    found = {record.name: record for record in map(records.load, embedding(tmp_path, say=lambda _: None, **options))}
    assert len(found) == 2 * 3
    for precision, least, most in (("float32", None, None), ("bfloat16", 1e-4, 2e-2), ("int8", 1e-4, 5e-2)):
        record = found[f"embedding/texts/{precision}"]
        times = {name: curve["forward_ms"][0] for name, curve in record.curves.items()}
        assert sorted(record.config["peers"]) == sorted(times)
        assert ("error_of_ours" in record.metrics) is (least is not None)
        if precision != "int8":
            assert record.metrics["speedup_over_sdpa_dense_bias_20"] == times[SDPA] / times[OURS]
        if least is not None:
            assert least < record.metrics["error_of_ours"] < most


@pytest.mark.parametrize("precisions", [(), ("float32", "float8")])
def test_an_unknown_precision_is_refused(precisions, tmp_path):
    with pytest.raises(ValueError, match="must be some of float32, bfloat16, int8"):
        embedding(tmp_path, **{**OPTIONS, "precisions": precisions})


def test_a_model_that_computes_something_else_is_not_timed(tmp_path):
    def shifted(sizes):
        model = our_encoder(sizes)
        model.register_forward_hook(
            lambda _, inputs, found: type(found)(last_hidden_state=found.last_hidden_state.roll(1, dims=1))
        )
        return model

    with pytest.raises(RuntimeError, match="is off by"):
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
    assert sum("it may need" in line for line in messages) == 2 * 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # raised inside torch.onnx
@pytest.mark.parametrize("name", [name for name, encoder in ENCODERS.items() if encoder.needs])
def test_another_program_gives_the_hidden_states_of_the_same_weights(name, tmp_path):
    reason = embedding_peers.why_not(name)
    if reason is not None:
        pytest.skip(f"an optional program that is rarely installed: {reason}")
    place = Place(tmp_path, our_encoder, OPTIONS["sizes"], 1)
    encoder = ENCODERS[name]
    encoder.write(place, encoder.precision)
    batches = ((33,), (20, 9, 1))
    opened = encoder.open(place, encoder.precision, batches, checked=True)
    with torch.inference_mode():
        for batch in batches:
            ids, mask = inputs(batch, place.sizes)
            true = our_encoder(place.sizes)(ids, mask).last_hidden_state[mask.bool()]
            error = (opened(ids, mask)[mask.bool()] - true).norm() / true.norm()
            assert (
                float(error) < {"float32": max(encoder.error, 1e-4), "bfloat16": 2e-2, "int8": 5e-2}[encoder.precision]
            )


def test_every_program_of_the_table_says_what_it_needs():
    assert {name.partition(",")[0] for name, encoder in ENCODERS.items() if encoder.needs} == {ONNX, LLAMA}
    missing = embedding_peers.why_not(LLAMA)
    assert missing is None or missing.endswith("cannot be imported")


def test_all_weights_get_a_name_of_llama_cpp():
    model = our_encoder(OPTIONS["sizes"])
    named = llama_encoder.tensors(model)
    assert len({name for name, _ in named}) == len(named) == len(model.state_dict()) + 2 * 2 * 2  # q, k and v
    assert sum(tensor.numel() for _, tensor in named) == sum(x.numel() for x in model.state_dict().values())


def test_the_weights_of_ours_are_all_taken_by_the_dense_peer():
    sizes = OPTIONS["sizes"]
    ours = our_encoder(sizes)
    peer = DenseEncoder(sizes, 8, eager=True)
    assert sum(x.numel() for x in peer.parameters()) == sum(x.numel() for x in ours.parameters())
    peer.take(ours.state_dict())
    state = ours.state_dict()
    state.pop("encoder.layer.1.mlp.wo.bias")
    with pytest.raises(RuntimeError, match="Missing key"):
        peer.take(state)
    assert torch.equal(peer.layers[0].attention.key.weight, ours.encoder.layer[0].attention.self.Wqkv.weight[64:128])
