"""A cache in a file is bit-identical to one in memory, survives kills, and raises on unsupported use."""

import copy
import errno
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from kills import killed_at_random
from refusals import assert_refused

from alibi_attn import ALiBiAttention, KVCache, files
from alibi_attn.nn.cache import file as cache_file

in_files = pytest.mark.skipif(sys.platform == "win32", reason="caches in files need Linux or macOS")
pytestmark = [in_files, pytest.mark.usefixtures("no_gradients")]


def layer_of(seed: int = 0, **options: object) -> ALiBiAttention:
    torch.manual_seed(seed)
    return ALiBiAttention(64, 4, **options).eval()


def numbered(first: int, count: int) -> torch.Tensor:
    """[1, 2, T, 4]: every entry is the position of its token."""
    return torch.arange(first, first + count, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 4).contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_in_a_file_gives_the_bits_of_the_cache_in_memory(dtype, tmp_path):
    """Two rows, one of them padded, with grouped heads; the file is reopened and the text is cropped in between."""
    layer, x = layer_of(num_kv_heads=2).to(dtype), torch.randn(2, 400, 64, dtype=dtype)
    mask = torch.arange(400) >= torch.tensor([[0], [100]])
    memory, file = KVCache(), KVCache(tmp_path / "cache")
    with torch.inference_mode():
        for start, stop in [(0, 130), (130, 131), (131, 300), (200, 201), (201, 392), (392, 393), (393, 400)]:
            memory.crop(start)
            file.crop(start)
            outputs = [layer(x[:, start:stop], cache=c, key_mask=mask[:, :stop]) for c in (memory, file)]
            assert torch.equal(*outputs)
            assert torch.equal(memory.groups[0].norms().keys, file.groups[0].norms().keys)
            if stop % 3 == 0:
                del file
                file = KVCache.open(tmp_path / "cache")
            assert torch.equal(file.key, memory.key)
            assert torch.equal(file.value, memory.value)
            file.verify()
    assert len(file) == 400


@pytest.mark.parametrize("opened", [False, True])
def test_a_file_made_or_opened_in_inference_mode_continues_outside(opened, tmp_path):
    layer, x = layer_of(), torch.randn(1, 200, 64)
    with torch.inference_mode():
        cache = KVCache(tmp_path / "cache")
        layer(x[:, :100].clone(), cache=cache)
        if opened:
            del cache
            cache = KVCache.open(tmp_path / "cache")
    torch.testing.assert_close(layer(x[:, 100:], cache=cache), layer(x)[:, 100:], rtol=1e-5, atol=1e-6)
    cache.verify()


def test_copies_are_in_memory_and_a_saved_cache_keeps_to_its_weights(tmp_path):
    """`test_cache_sequences.py` saves, opens and copies caches and continues them."""
    layer, cache, x = layer_of(), KVCache(), torch.randn(1, 90, 64)
    layer(x, cache=cache)
    cache.save(tmp_path / "cache")
    opened = KVCache.open(tmp_path / "cache")
    assert copy.deepcopy(opened).path is pickle.loads(pickle.dumps(opened)).path is None
    opened.save(tmp_path / "again")  # no layer has appended to it
    again = KVCache.open(tmp_path / "again")
    assert_refused(("was written with other weights", lambda: layer_of(1)(x[:, :1], cache=again)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "cache"]
    assert "90 tokens" in repr(opened)
    assert str(tmp_path) in repr(opened)


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_full_file_grows_and_private_changes_leave_it_alone(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CAPACITY", 1)  # rounded up to 16,384
    path = tmp_path / "cache"
    cache = KVCache(path)
    cache.append(numbered(0, 16000), numbered(0, 16000))
    del cache
    before = path.read_bytes()
    cache = KVCache.open(path, mode=mode)
    cache.append(numbered(16000, 1000), numbered(16000, 1000))
    cache.crop(16500)
    cache.append(numbered(16500, 20000), numbered(16500, 20000))
    cache.append(numbered(36500, 0), numbered(36500, 0))  # no tokens, after an incomplete tile
    for tensor in (cache.key, cache.value):
        assert torch.equal(tensor, numbered(0, 36500))
    cache.verify()
    del cache, tensor
    if mode == "c":
        assert path.read_bytes() == before
    assert len(KVCache.open(path)) == (16000 if mode == "c" else 36500)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


def test_private_changes_survive_the_release_of_memory(tmp_path):
    KVCache(tmp_path / "cache").append(numbered(0, 3000), numbered(0, 3000))
    first, second = (KVCache.open(tmp_path / "cache", mode="c") for _ in range(2))
    first.crop(1500)
    first.append(-numbered(0, 9000), numbered(0, 9000))
    second.append(numbered(3000, 5000), numbered(3000, 5000))
    assert torch.equal(first.key, torch.cat([numbered(0, 1500), -numbered(0, 9000)], dim=2))
    assert torch.equal(second.key, numbered(0, 8000))
    first.verify()
    second.verify()


def test_a_copy_keeps_its_norms_when_the_file_gets_other_keys(tmp_path):
    cache = KVCache(tmp_path / "cache")
    cache.append(numbered(1, 200), numbered(1, 200))
    twin = copy.deepcopy(cache)
    before = twin.groups[0].norms().keys.clone()
    cache.crop(0)
    cache.append(torch.zeros(1, 2, 200, 4), torch.zeros(1, 2, 200, 4))
    assert torch.equal(twin.groups[0].norms().keys, before)


def resident(path: Path) -> int:
    """Bytes of the file's mappings that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = line.split()[4] == str(path.stat().st_ino)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_holds_the_last_tokens_and_not_the_text(tmp_path):
    cache = KVCache(tmp_path / "cache")
    for start in range(0, 40000, 1000):
        token = torch.randn(1, 8, 1000, 64)
        cache.append(token, token)
        if start % 2000 == 0:
            assert resident(tmp_path / "cache") < 10 * 2 * token.nbytes
    assert cache.nbytes == 40 * 2 * token.nbytes
    cache.key.sum()
    assert resident(tmp_path / "cache") > 30 * token.nbytes, "the check above can fail"


def test_damage_and_other_weights_are_refused(tmp_path):
    path, layer = tmp_path / "cache", layer_of()
    layer(torch.randn(1, 200, 64), cache=KVCache(path))
    cache = KVCache.open(path)
    with pytest.raises(ValueError, match="was written with other weights"):
        layer_of(1)(torch.randn(1, 1, 64), cache=cache)
    assert len(cache) == 200
    layer(torch.randn(1, 1, 64), cache=cache)
    file = cache.groups[0].file
    offsets = {"header": 20, "norms": cache_file._TABLE + 5, "tokens 64 to 127": file._regions[1][0] + 70 * 64}
    del cache, file
    good = path.read_bytes()
    for name, at in offsets.items():
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        if name.startswith("tokens"):
            opened = KVCache.open(path)  # which does not read the tokens
            with pytest.raises(ValueError, match=f"damaged at {name}"):
                opened.verify()
            del opened  # closes the file
        else:
            with pytest.raises(ValueError, match=f"damaged.*{name}"):
                KVCache.open(path)
    path.write_bytes(good)
    KVCache.open(path).verify()


def test_a_full_disk_loses_nothing_and_leaves_no_incomplete_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CAPACITY", 1)  # rounded up to 16,384
    cache = KVCache(tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.append(numbered(0, 16000), numbered(0, 16000))
    with monkeypatch.context() as disk:
        disk.setattr(files, "reserve", full)
        with pytest.raises(OSError, match="No space left"):
            cache.append(numbered(16000, 1000), numbered(16000, 1000))
        with pytest.raises(OSError, match="No space left"):
            cache.save(tmp_path / "copy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    cache.append(numbered(16000, 1000), numbered(16000, 1000))
    assert torch.equal(cache.key, numbered(0, 17000))
    cache.verify()


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_file_that_lost_its_end_is_refused(mode, tmp_path):
    path = tmp_path / "cache"
    KVCache(path).append(numbered(0, 500), numbered(0, 500))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="damaged: it is shorter than its header says"):
        KVCache.open(path, mode=mode)


@torch.enable_grad()
def test_operations_that_a_file_does_not_support_are_refused(tmp_path, monkeypatch):
    layer, x, path, new = (
        layer_of(),
        torch.randn(2, 5, 64),
        tmp_path / "cache",
        r"exists; continue it with open\(path\)",
    )
    cache = KVCache(path)
    assert_refused(("without gradients", lambda: layer(x, cache=cache)))
    with torch.no_grad():
        second, late = (KVCache(tmp_path / "shared") for _ in range(2))
        layer(x, cache=cache), layer(x, cache=second)
        cache.reorder([0, 1])
        assert_refused(
            ("would copy the file; for beams", lambda: cache.reorder([1, 0])),
            ("forget gates", lambda: layer_of(forget_gate=True)(x, cache=KVCache(tmp_path / "gates"))),
            (new, lambda: layer(x, cache=late)),
            (new, lambda: KVCache(path)),
            ("path or max_tokens", lambda: KVCache(tmp_path / "other", max_tokens=9)),
            ("is not a folder", lambda: KVCache(tmp_path / "no" / "cache")),
            (r'open elsewhere.*mode="c"', lambda: KVCache.open(path)),
            ("mode is 'w'", lambda: KVCache.open(path, mode="w")),
        )
        cache.crop(0)
        assert_refused((r"key is \[1, 4, 5, 16\]", lambda: layer(x[:1], cache=cache)))
    assert len(second) == 5
    del second
    assert len(KVCache.open(tmp_path / "shared")) == 5
    assert_refused(("none", lambda: KVCache.open(tmp_path / "none")), error=FileNotFoundError)
    monkeypatch.setattr(sys, "platform", "win32")
    assert_refused(("Windows does not offer", lambda: KVCache(tmp_path / "windows")), error=NotImplementedError)


def test_a_file_replaced_while_it_is_opened_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(), torch.randn(2, 9, 64)
    for name, tokens in (("cache", 5), ("larger", 9)):
        layer(x[:, :tokens], cache=KVCache(tmp_path / name))

    lock = files.lock

    def lock_late(*arguments: object, **options: bool) -> bool:
        if (tmp_path / "larger").exists():
            (tmp_path / "larger").replace(tmp_path / "cache")
        return lock(*arguments, **options)

    monkeypatch.setattr(files, "lock", lock_late)
    assert len(KVCache.open(tmp_path / "cache")) == 9


APPENDS = """
    def work():
        cache = KVCache.open(path)
        generator = torch.Generator().manual_seed(len(cache))
        with torch.no_grad():
            while True:
                action = int(torch.randint(0, 20, (), generator=generator))
                if action == 0:
                    cache.crop(max(0, len(cache) - 100))
                count = 700 if action == 1 else 1 + action
                position = torch.arange(len(cache), len(cache) + count, dtype=torch.float32)
                token = position[None, None, :, None].expand(1, 2, -1, 4).contiguous()
                cache.append(token, token)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.long)])
def test_a_cache_killed_while_it_appends_opens_with_the_right_bits(kills, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CAPACITY", 1)
    path, lengths = tmp_path / "cache", []
    KVCache(path).append(numbered(0, 10), numbered(0, 10))
    for _ in killed_at_random(APPENDS, path, kills=kills, longest=0.3):
        cache = KVCache.open(path)
        cache.verify()
        for tensor in (cache.key, cache.value):
            assert torch.equal(tensor, numbered(0, len(cache)))
        lengths.append(len(cache))
        del cache, tensor
    assert max(lengths) > 1000
