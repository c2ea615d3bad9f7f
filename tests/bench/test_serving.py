"""The serving benchmarks run, say what they measured, and keep whole records; how long anything took is not tested."""

import pytest

from alibi_attn import records
from alibi_attn.attention.decoding import attend_near
from alibi_attn.bench import serving as module
from alibi_attn.bench.decoding import decoding
from alibi_attn.bench.generating import generating
from alibi_attn.bench.serving import FAMILIES, serving
from alibi_attn.bench.streaming import streaming
from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.report.benchmarks import is_drawn


def test_a_record_a_family_with_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    for name, value in (("TURNS", 1), ("WARM_UP_LENGTH", 64), ("CHECKED_LENGTH", 64)):
        monkeypatch.setattr(module, name, value)
    said = []
    paths = serving(tmp_path, patch=patch, lengths=(100, 120), unpatched_lengths=(100,), width=64, say=said.append)
    assert [records.load(path).name for path in paths] == [f"serving/{family}" for family in FAMILIES]
    assert len(said) == 3 * 4
    for path in paths:
        record = records.load(path)
        assert is_drawn(record)
        assert record.config["skipped_for_lack_of_memory"] == []
        # Falcon's own bias is rounded to bf16 in every dtype, so that exact attention differs from it.
        assert record.metrics["logits_error"] < 1e-5 or "falcon" in record.name
        assert record.metrics["logits_error_checkpoint"] < 1e-5
        assert record.curves["ours"]["length"] == [100, 120]
        assert record.curves["transformers"]["length"] == [100]
        assert all(seconds > 0 for seconds in record.curves["ours"]["attention_seconds"])
        assert set(record.metrics) == {
            "logits_error",
            "logits_error_checkpoint",
            "speedup_100",
            "attention_speedup_100",
        }
    with pytest.raises(ValueError, match="family is 'gpt2' but must be one of bloom, mpt, falcon"):
        serving(tmp_path, patch=patch, families=["gpt2"])


def test_a_stream_is_held_against_the_full_pass(tmp_path):
    said = []
    record = records.load(streaming(tmp_path, tokens=600, chunk=30, windows=3, say=said.append))
    assert record.curves["ours"]["length"] == [200, 400, 600]
    assert record.metrics["error_of_longest_output"] < 1e-5
    assert len(said) == 4


def test_a_token_with_a_long_cache_is_compared_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("alibi_attn.attention.decoding.LONG", 0)
    said, sizes = [], {"layers": 1, "num_heads": 2, "head_dim": 8, "repeats": 1}
    path = generating(tmp_path, patch=patch, alibi_cache=ALiBiCache, lengths=(40, 90), say=said.append, **sizes)
    record = records.load(path)
    assert is_drawn(record)
    rows = {"ours, two rows", "ours, two rows behind padding", "ours, one row a quarter as long"}
    assert set(record.curves) == {"ours", "patched, DynamicCache", "transformers", "transformers, StaticCache", *rows}
    assert all(curve["length"] == [40, 90] and min(curve["forward_ms"]) > 0 for curve in record.curves.values())
    assert record.metrics.keys() == {"padding_costs_40", "padding_costs_90"}
    assert len(said) == 2

    class Forgetful(ALiBiCache):
        def update(self, key, value, layer_idx):
            return super().update(key * 0, value, layer_idx)

    with pytest.raises(RuntimeError, match="ours is off"):
        generating(tmp_path / "wrong", patch=patch, alibi_cache=Forgetful, lengths=(40,), **sizes)

    def blind(*args, visible=None, **options):  # as if the mask were not there
        return attend_near(*args, **options)

    monkeypatch.setattr("alibi_attn.hf.dialect.attend_near", blind)
    with pytest.raises(RuntimeError, match="behind padding is off"):
        generating(tmp_path / "blind", patch=patch, alibi_cache=ALiBiCache, lengths=(40,), **sizes)


def test_what_may_not_fit_is_skipped_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    for name, value in (("TURNS", 1), ("WARM_UP_LENGTH", 64), ("CHECKED_LENGTH", 64)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "available_bytes", lambda: module.SPARE_BYTES)
    said = []
    options = {"lengths": (100,), "unpatched_lengths": (100, 300), "families": ["mpt"], "width": 64}
    (path,) = serving(tmp_path, patch=patch, say=said.append, **options)
    record = records.load(path)
    assert record.config["skipped_for_lack_of_memory"] == ["transformers 300"]
    assert record.curves["transformers"]["length"] == [100]
    assert "skipped, it may need" in said[-1]


def test_decoding_is_recorded_with_the_share_of_keys_within_reach(tmp_path):
    said = []
    record = records.load(decoding(tmp_path, lengths=(300, 3000), num_heads=4, head_dim=8, repeats=1, say=said.append))
    assert is_drawn(record)
    assert len(said) == 2
    others = ["ours, all keys", "causal, no bias", "SDPA + dense bias", "eager"]
    assert sorted(record.curves) == sorted(["ours", *others])
    for curve in record.curves.values():
        assert curve["length"] == [300, 3000]
        assert all(error < 1e-6 for error in curve["relative_error"])
    near, far = record.curves["ours"]["keys_within_reach"]
    assert 0 < far < near <= 1
    assert all(record.curves[name]["keys_within_reach"] == [1.0, 1.0] for name in others)
