"""The benchmarks of serving, generating, streaming and decoding keep complete records. Durations are not tested."""

import contextlib

import pytest
import torch
from alibi_lab.measure.generating import generating
from alibi_lab.measure.serving import serving
from alibi_lab.measure.streaming import streaming
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn.attention.decoding import attend_near
from alibi_attn.hf import ALiBiCache
from alibi_lab import records
from alibi_lab.measure import serving as module
from alibi_lab.measure import timing
from alibi_lab.measure.decoding import decoding
from alibi_lab.measure.peers import programs
from alibi_lab.measure.peers.transformers_decoders import FAMILIES
from alibi_lab.report.plots.benchmark import is_drawn


@pytest.fixture(autouse=True)
def _without_peers(monkeypatch):
    """Leaves out llama.cpp and CTranslate2, whether they are installed or not."""
    monkeypatch.setattr(programs, "why_not", dict)


@pytest.fixture
def here(monkeypatch):
    """Everything runs in this process, once and on short inputs."""
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments, **_: function(*arguments))
    for name, value in (("TURNS", 1), ("WARM_UP_LENGTH", 64), ("CHECKED_LENGTH", 64)):
        monkeypatch.setattr(module, name, value)


class Echo:
    """A peer that returns the model's own logits, off by a relative error."""

    def __init__(self, model, off):
        self.model, self.off = model, off

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].numpy() * (1 + self.off)


@pytest.mark.parametrize("off", [0.0, 0.01])
@pytest.mark.usefixtures("here")
def test_other_programs_are_compared_first_and_then_measured(off, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "why_not", lambda: {"peer": None, "absent": "absent cannot be imported"})
    opened = lambda name, model, *, room, threads: contextlib.nullcontext(Echo(model, off))  # noqa: E731
    monkeypatch.setattr(programs, "opened", opened)
    messages = []
    served = {"lengths": (70,), "unpatched_lengths": (70,), "width": 64, "families": ["bloom"], "say": messages.append}
    (path,) = serving(tmp_path, **served)
    record = records.load(path)
    assert messages.count("absent is left out: absent cannot be imported") == 1
    if off:
        assert record.config["skipped"] == ["peer 70"]
        assert sum("off by 1.0e-02" in words and "not comparable" in words for words in messages) == 1
        return
    assert is_drawn(record)
    assert record.curves["peer"]["length"] == [70]
    assert record.curves["peer"]["attention_seconds"] == [None]
    assert record.metrics["speedup_peer_70"] > 0
    assert record.metrics["logits_error_peer_70"] < 1e-6


@pytest.mark.usefixtures("here")
def test_every_family_has_a_record_of_patched_and_original(tmp_path, monkeypatch):
    messages = []
    options = {"lengths": (100, 120), "unpatched_lengths": (100,), "width": 64, "say": messages.append}
    paths = serving(tmp_path, **options)
    assert [records.load(path).name for path in paths] == [f"serving/{family}" for family in FAMILIES]
    assert len(messages) == 4 * (1 + 2 * 2 + 1)  # errors; ours in both dtypes at two lengths; the original at one
    for path in paths:
        record = records.load(path)
        assert is_drawn(record)
        assert record.config["skipped"] == []
        # Falcon's own bias is rounded to bf16 in every dtype, so that exact attention differs from it.
        assert record.metrics["logits_error"] < 1e-5 or "falcon" in record.name
        assert record.metrics.get("logits_error_checkpoint", 0.0) < 1e-5
        assert record.curves["ours"]["length"] == [100, 120]
        assert record.curves["ours, bf16"]["length"] == [100, 120]
        assert record.curves["transformers"]["length"] == [100]
        assert 0 < record.metrics["logits_error_bf16"] < 0.05
        for name in ("ours", "ours, bf16", "transformers"):
            times = zip(record.curves[name]["forward_ms"], record.curves[name]["attention_seconds"], strict=True)
            assert all(0 < seconds < whole / 1e3 for whole, seconds in times)
        assert set(record.metrics) == {
            "logits_error",
            *(["logits_error_checkpoint"] * (record.config["family"] != "t5")),
            "logits_error_bf16",
            "speedup_100",
            "attention_speedup_100",
        }
    with pytest.raises(ValueError, match="family is 'gpt2' but must be one of bloom, mpt, falcon"):
        serving(tmp_path, families=["gpt2"])
    monkeypatch.setattr(module, "in_fresh_process", None)
    with pytest.raises(FileExistsError, match="never overwritten"):
        serving(tmp_path, **options)


def test_a_stream_is_compared_with_the_full_pass(tmp_path):
    messages = []
    record = records.load(*streaming(tmp_path, tokens=600, chunk=30, windows=3, say=messages.append))
    assert record.curves["ours"]["length"] == [200, 400, 600]
    assert record.metrics["error_of_longest_output"] < 1e-5
    assert len(messages) == 3 + 1


def test_a_token_with_a_long_cache_is_compared_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("alibi_attn.attention.decoding.LONG", 0)
    messages, sizes = [], {"layers": 1, "num_heads": 2, "head_dim": 8, "repeats": 1}
    (path,) = generating(tmp_path, lengths=(40, 90), say=messages.append, **sizes)
    record = records.load(path)
    assert is_drawn(record)
    rows = {"ours, two rows", "ours, two rows behind padding", "ours, one row a quarter as long"}
    theirs = {"transformers", "transformers, StaticCache"}
    assert set(record.curves) == {"ours", "patched, DynamicCache", *theirs, *rows}
    assert all(curve["length"] == [40, 90] and min(curve["forward_ms"]) > 0 for curve in record.curves.values())
    assert record.metrics.keys() == {"padding_costs_40", "padding_costs_90"}
    assert len(messages) == 2 * 7 + 1

    class Forgetful(ALiBiCache):
        def update(self, key, value, *args, **options):
            return super().update(key * 0, value, *args, **options)

    with pytest.raises(RuntimeError, match="ours is off"):
        generating(tmp_path / "wrong", our_cache=Forgetful, lengths=(40,), **sizes)

    def blind(*args, visible=None, **options):  # ignores the mask
        return attend_near(*args, **options)

    monkeypatch.setattr("alibi_attn.attention.decoding.attend_near", blind)
    with pytest.raises(RuntimeError, match="behind padding is off"):
        generating(tmp_path / "blind", lengths=(40,), **sizes)


@pytest.mark.usefixtures("here")
def test_measurements_that_may_not_fit_are_skipped_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "available_bytes", lambda: timing.SPARE_BYTES)
    messages = []
    options = {"lengths": (100,), "unpatched_lengths": (100, 300), "families": ["mpt"], "width": 64}
    (path,) = serving(tmp_path, say=messages.append, **options)
    record = records.load(path)
    assert record.config["skipped"] == ["transformers 300"]
    assert record.curves["transformers"]["length"] == [100]
    assert "skipped, it may need" in messages[-1]


def test_decoding_is_recorded_with_the_share_of_keys_within_reach(tmp_path):
    messages = []
    record = records.load(
        *decoding(tmp_path, lengths=(300, 3000), num_heads=4, head_dim=8, repeats=1, say=messages.append)
    )
    assert is_drawn(record)
    assert len(messages) == 2 * 5
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
        pytest.importorskip(library, reason="an optional program that is rarely installed")
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=100)).eval()
    tokens = torch.randint(100, (40,)).tolist()
    with torch.no_grad(), programs.opened(name, model, room=64, threads=1) as peer:
        expected = model(torch.tensor([tokens])).logits[0, -1]
        actual = torch.from_numpy(peer.logits(tokens))
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4
        assert peer.several(tokens, 16)() != 0
