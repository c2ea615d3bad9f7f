"""The benchmark of long texts: it reads, opens and shares a cache, keeps one record, and resumes."""

import sys
import time
from types import SimpleNamespace

import pytest

from alibi_attn.hf.patching import reading
from alibi_lab import records
from alibi_lab.cli.main import main
from alibi_lab.measure import long_texts as module
from alibi_lab.measure import timing
from alibi_lab.measure.long_texts import long_texts

pytestmark = [
    # JAX warns if an earlier test loaded it.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_long_text_is_read_opened_and_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 64)
    lines: list[str] = []
    (path,) = long_texts(tmp_path / "new", tokens=1300, width=64, layers=1, processes=2, say=lines.append)
    (record,) = records.find(path)
    rows = record.curves["ours"]
    assert rows["length"] == [130 * tenth for tenth in range(1, 11)]
    assert all(0 < number < 1 for number in rows["token_seconds"] + rows["token_cpu_seconds"])
    assert (record.metrics["compared_tokens"], record.metrics["largest_loss_difference"]) == (1300, 0)
    assert record.metrics["stored_bytes"] > 2 * 1300 * 64 * 4
    assert 1 < record.metrics["pss_of_one_bytes"] <= record.metrics["pss_of_all_bytes"] * 1.1
    assert "pss_of_all_bytes" in lines[-1]
    with pytest.raises(FileExistsError):
        long_texts(tmp_path / "new", tokens=1300, width=64, layers=1, processes=2)


def test_other_systems_are_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["alibi", "bench", "long-texts", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert (ended.value.code, list(tmp_path.iterdir())) == (1, [])
    assert "only Linux has; use Linux, or WSL on Windows" in said
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
