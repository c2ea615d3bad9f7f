"""The serving benchmarks run, say what they measured, and keep whole records; how long anything took is not tested."""

import contextlib

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import records
from alibi_attn.attention.decoding import attend_near
from alibi_attn.bench import model_peers
from alibi_attn.bench import serving as module
from alibi_attn.bench.decoding import decoding
from alibi_attn.bench.generating import generating
from alibi_attn.bench.serving import FAMILIES, serving
from alibi_attn.bench.streaming import streaming
from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.report.benchmarks import is_drawn


@pytest.fixture(autouse=True)
def _without_peers(monkeypatch):
    """Whether they are installed here or not."""
    monkeypatch.setattr(model_peers, "why_not", dict)


class Echo:
    """A peer that answers by the model itself, off by a share."""

    def __init__(self, model, off):
        self.model, self.off = model, off

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].numpy() * (1 + self.off)

    def token(self, tokens):
        return lambda: 0.001


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_other_programs_are_compared_first_and_then_measured(off, tmp_path, monkeypatch):
    monkeypatch.setattr(model_peers, "why_not", lambda: {"peer": None, "absent": "absent cannot be imported"})
    opened = lambda name, model, *, room, threads: contextlib.nullcontext(Echo(model, off))  # noqa: E731
    monkeypatch.setattr(model_peers, "opened", opened)
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    for name, value in (("TURNS", 1), ("WARM_UP_LENGTH", 64), ("CHECKED_LENGTH", 64)):
        monkeypatch.setattr(module, name, value)
    said, sizes = [], {"layers": 1, "num_heads": 2, "head_dim": 8, "repeats": 1}
    served = {"lengths": (70,), "unpatched_lengths": (70,), "width": 64, "families": ["bloom"], "say": said.append}
    generated = {"patch": patch, "alibi_cache": ALiBiCache, "lengths": (40,), "say": said.append, **sizes}
    if off:
        (path,) = serving(tmp_path, patch=patch, **served)
        assert records.load(path).config["skipped"] == ["peer 70"]
        assert "peer" not in records.load(generating(tmp_path, **generated)).curves
        assert sum("off by 1.0e-02" in words and "its time says nothing" in words for words in said) == 2
        return
    (path,) = serving(tmp_path, patch=patch, **served)
    record = records.load(path)
    assert is_drawn(record)
    assert record.curves["peer"]["length"] == [70]
    assert record.curves["peer"]["attention_seconds"] == [None]
    assert record.metrics["speedup_peer_70"] > 0
    assert record.metrics["logits_error_peer_70"] < 1e-6
    record = records.load(generating(tmp_path, **generated))
    assert record.curves["peer"]["forward_ms"] == [pytest.approx(1.0)]
    assert record.metrics["token_over_peer_40"] == pytest.approx(record.curves["ours, after a prompt"]["forward_ms"][0])
    assert said.count("absent is left out: absent cannot be imported") == 2


def test_a_record_a_family_with_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    for name, value in (("TURNS", 1), ("WARM_UP_LENGTH", 64), ("CHECKED_LENGTH", 64)):
        monkeypatch.setattr(module, name, value)
    said = []
    paths = serving(tmp_path, patch=patch, lengths=(100, 120), unpatched_lengths=(100,), width=64, say=said.append)
    assert [records.load(path).name for path in paths] == [f"serving/{family}" for family in FAMILIES]
    assert len(said) == 3 * (1 + 2 * 2 + 1)  # the errors, ours in both dtypes at two lengths, and theirs at one
    for path in paths:
        record = records.load(path)
        assert is_drawn(record)
        assert record.config["skipped"] == []
        # Falcon's own bias is rounded to bf16 in every dtype, so that exact attention differs from it.
        assert record.metrics["logits_error"] < 1e-5 or "falcon" in record.name
        assert record.metrics["logits_error_checkpoint"] < 1e-5
        assert record.curves["ours"]["length"] == [100, 120]
        assert record.curves["ours, bf16"]["length"] == [100, 120]
        assert record.curves["transformers"]["length"] == [100]
        assert 0 < record.metrics["logits_error_bf16"] < 0.05
        assert all(seconds > 0 for seconds in record.curves["ours"]["attention_seconds"])
        assert set(record.metrics) == {
            "logits_error",
            "logits_error_checkpoint",
            "logits_error_bf16",
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
    theirs = {"transformers", "transformers, StaticCache"}
    assert set(record.curves) == {"ours", "ours, after a prompt", "patched, DynamicCache", *theirs, *rows}
    assert all(curve["length"] == [40, 90] and min(curve["forward_ms"]) > 0 for curve in record.curves.values())
    assert record.metrics.keys() == {
        f"{name}_{length}" for name in ("padding_costs", "first_token_ms") for length in (40, 90)
    }
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
    assert record.config["skipped"] == ["transformers 300"]
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


@pytest.mark.parametrize(("name", "needed"), [("llama.cpp", ("llama_cpp", "gguf")), ("CTranslate2", ("ctranslate2",))])
def test_other_programs_give_the_logits_of_the_same_weights(name, needed):
    for library in needed:
        pytest.importorskip(library, reason="it is no dependency, and rarely here")
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=100)).eval()
    tokens = torch.randint(100, (40,)).tolist()
    with torch.no_grad(), model_peers.opened(name, model, room=64, threads=1) as peer:
        expected = model(torch.tensor([tokens])).logits[0, -1]
        actual = torch.from_numpy(peer.logits(tokens))
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4
        assert peer.token(tokens)() != 0
