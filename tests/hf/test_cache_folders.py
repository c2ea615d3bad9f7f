"""Caches in files that several processes write, on full disks, and with files of two caches mixed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import printed

from alibi_attn.hf import ALiBiCache, read
from alibi_attn.nn.cache import file as cache_file

PROCESSES = Path(__file__).parents[1] / "support" / "processes"
in_files = pytest.mark.skipif(sys.platform == "win32", reason="caches in files need Linux or macOS")
pytestmark = [in_files, pytest.mark.usefixtures("no_gradients")]


@pytest.mark.parametrize("trials", [10, pytest.param(60, marks=pytest.mark.long)])
def test_of_processes_that_write_one_new_path_one_wins_and_the_others_are_told(trials, tmp_path):
    told = json.loads(printed(PROCESSES / "racing_writers.py", tmp_path, trials, OMP_NUM_THREADS="1"))
    assert told == {"counts": {"save": trials, "KVCache.save": trials, "read": trials}, "faults": [], "left": []}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs Linux and root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_raises_and_leaves_the_files_as_they_were(small_disk):
    told = json.loads(printed(PROCESSES / "full_disk.py", small_disk, OMP_NUM_THREADS="1"))
    assert {name: found["code"] for name, found in told.items()} == dict.fromkeys(told, 0)
    assert all(min(found["completed"], found["failed"]) >= 5 for found in told.values()), told


@pytest.fixture
def two(build_patched, tokens, tmp_path, monkeypatch):
    """A model, and the folders of two texts of one length."""
    monkeypatch.setattr(cache_file, "CAPACITY", 1)  # small files
    model = build_patched("bloom")
    for seed in range(2):
        read(model, tokens(1, 100, seed=seed), ALiBiCache(tmp_path / f"{seed}"))
        ALiBiCache.open(tmp_path / f"{seed}").save(tmp_path / f"saved {seed}")
    return model, tmp_path


@pytest.mark.parametrize("saved", ["", "saved "])
@pytest.mark.parametrize("mode", ["r+", "c"])
def test_layers_of_two_texts_are_not_mixed(mode, saved, two):
    _, folder = two
    shutil.copy(folder / f"{saved}1" / "layer-000", folder / f"{saved}0" / "layer-000")
    with pytest.raises(ValueError, match=r"layer 0 of .*, not layer 0 of .*: files of two caches are mixed"):
        ALiBiCache.open(folder / f"{saved}0", mode=mode)
    ALiBiCache.open(folder / f"{saved}1", mode=mode).verify()


def test_exchanged_layers_and_token_ids_of_another_text_are_noticed(two):
    _, folder = two
    shutil.copy(folder / "1" / "tokens", folder / "0" / "tokens")
    with pytest.raises(ValueError, match="token ids of the cache are damaged"):
        ALiBiCache.open(folder / "0").verify()
    shutil.copy(folder / "1" / "layer-000", folder / "1" / "layer-001")
    with pytest.raises(ValueError, match=r"layer-001 is layer 0 of .*, not layer 1 of"):
        ALiBiCache.open(folder / "1")


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_damaged_small_files_are_named(mode, two):
    _, folder = two
    for name, content, reason in (
        ("tokens", b"", "tokens is too short"),
        ("tokens", bytes(1200), "tokens does not match its checksums"),
        ("cache.json", b"\xff", "cache.json is damaged"),
    ):
        (folder / "0" / name).write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            ALiBiCache.open(folder / "0", mode=mode).verify()


@pytest.mark.parametrize("slot", [4096, 8192])
def test_a_saved_cache_survives_the_damage_of_either_state(slot, two):
    _, folder = two
    with (folder / "saved 0" / "layer-000").open("r+b") as file:
        file.seek(slot)
        file.write(b"\xff")
    assert ALiBiCache.open(folder / "saved 0").get_seq_length() == 100


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_of_one_token_has_its_ids(batch, build_patched, tokens, tmp_path):
    model, ids, cache = build_patched("bloom"), tokens(batch, 1), ALiBiCache(tmp_path / "cache")
    model(ids, past_key_values=cache, use_cache=True)
    assert torch.equal(cache.tokens(), ids)
    cache.verify()
    cache.save(tmp_path / "copy")
    assert torch.equal(ALiBiCache.open(tmp_path / "copy").tokens(), ids)
