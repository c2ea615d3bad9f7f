"""The benchmark of long texts: it reads, opens and shares a cache, keeps one record, and resumes."""

import sys
import time
from types import SimpleNamespace

import pytest

from alibi_attn.hf.patching import reading
from alibi_lab import records
from alibi_lab.cli.main import main
from alibi_lab.measure import texts as module
from alibi_lab.measure import timing

pytestmark = [
    # JAX warns if an earlier test loaded it.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_long_text_is_read_opened_and_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 64)
    lines: list[str] = []
    metrics: dict[str, float | None] = {}
    rows = module.cached(tmp_path / "new", 1300, 2, metrics, lines.append, layers=1, width=64)
    tenths = [row["ours"] for row in rows if row]
    assert [row["length"] for row in tenths] == [130 * tenth for tenth in range(1, 11)]
    assert all(0 < row[name] < 1 for row in tenths for name in ("token_seconds", "token_cpu_seconds"))
    assert (metrics["compared_tokens"], metrics["largest_loss_difference"]) == (1300, 0)
    assert metrics["stored_bytes"] > 2 * 1300 * 64 * 4
    assert 1 < metrics["pss_of_one_bytes"] <= metrics["pss_of_all_bytes"] * 1.1


def test_a_documents_vectors_are_compared_before_they_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    options = {"parts": ["document", "passages"], "tokens": 1000, "checked": 700, "layers": 1, "width": 64}
    paths = module.texts(tmp_path, **options, say=lambda line: None)
    document, passages = map(records.load, paths)
    assert document.curves["ours"]["length"] == [1000]
    assert document.curves["ours"]["error_against_undivided"][0] < 1e-5
    assert passages.curves["one pass"]["worst_cosine"] == [pytest.approx(1, abs=1e-5)]
    alone, wide = (passages.curves[name]["cosine"][0] for name in ("each passage alone", "windows of 512, 128 shared"))
    assert alone < wide < 1
    monkeypatch.setattr(module, "vectors", lambda model, document, windows=None: 1.01 * vectors(model, document))
    with pytest.raises(RuntimeError, match="vectors differ by 1"):
        module.texts(tmp_path / "wrong", **options)


vectors = module.vectors


def test_wrong_options_are_refused(tmp_path):
    for options, words in (
        ({"parts": ["pages"]}, "parts is 'pages'.*; pass one of cache"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"parts": ["cache"], "tokens": 100}, "reads at least 20000"),
    ):
        with pytest.raises(ValueError, match=words):
            module.texts(tmp_path, **options)


def test_other_systems_are_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["alibi", "bench", "texts", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert (ended.value.code, list(tmp_path.iterdir())) == (1, [])
    assert "only Linux has; use Linux or WSL" in said
    assert "Traceback" not in said


def test_the_peak_memory_of_windows_is_that_of_psutil(monkeypatch):
    peak = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=12_345))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: peak))
    assert timing.peak_rss_bytes() == 12_345


def test_a_process_that_fails_ends_the_others(tmp_path, monkeypatch):
    def one_fails(model, folder, index, pipe):
        if index == 0:
            raise SystemExit
        pipe.send("decoded")
        time.sleep(5)
        (folder / f"waited-{index}").touch()

    monkeypatch.setattr(module, "_continue", one_fails)
    with pytest.raises(EOFError):
        module.shared_bytes(None, tmp_path, 3)
    assert not list(tmp_path.iterdir())
