"""Pickles and files of caches: what each format holds, other formats are refused by name, old ones open."""

import base64
import copy
import json
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alibi_attn.nn import KVCache, by_gates, within_reach
from alibi_attn.nn.cache import cache as module

# Pickles and a file of 73 tokens that an earlier version wrote, compressed.
OLD = json.loads((Path(__file__).parent / "data" / "caches_format_1.json").read_text())
BOUND = {"score_bound": 3.0, "tolerance": 1e-6}
MAKE: dict[str, Callable[[], KVCache]] = {
    "all": KVCache,
    "stream": lambda: KVCache(max_tokens=4, sinks=1),
    "gates": KVCache,
    "reach": lambda: KVCache(retention=within_reach([2, 9], **BOUND)),
    "reach, sinks": lambda: KVCache(retention=within_reach([2, 9], sinks=2, **BOUND)),
    "by gates": lambda: KVCache(retention=by_gates([0.5, 0.0], num_kv_heads=2, **BOUND)),
    "capacity": lambda: KVCache(capacity=9),
    "reach, capacity": lambda: KVCache(capacity=9, retention=within_reach([2, 90], **BOUND)),
}
# What a pickle of each format holds. To change it, raise the number and add a line, or keep reading the older one.
HOLDS = {
    1: ["format", "max_tokens", "sinks", "forgotten", "key", "value", "gates"],
    2: ["format", "retention", "groups", "sinks", "_seen", "_gone", "_since", "_longest_key", "fixed"],
}


def appended(kind: str, cache: KVCache, tokens: Tensor) -> list[Tensor]:
    """All tensors that queries need after each of these tokens [N, 1, 2, 1, 4]."""
    found = []
    with torch.no_grad():
        for token in tokens:
            gates = (-token.abs()[..., 0],) if "gates" in kind else ()
            for kept in cache.append(token, token, *gates):
                found += [x for x in (kept.key, kept.value, kept.log_fgate, kept.exists) if x is not None]
    return [x.clone() for x in found]


def drawn(count: int = 5) -> Tensor:
    return torch.randn(count, 1, 2, 1, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_pickle_holds_what_its_format_says(kind: str, tokens: int) -> None:
    cache = MAKE[kind]()
    appended(kind, cache, drawn(tokens))
    state = cache.__getstate__()
    assert state["format"] == (1 if kind in ("all", "stream", "gates") else 2)
    assert list(state) == HOLDS[state["format"]]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_copy_continues_as_the_cache_does_and_leaves_it_alone(
    kind: str, copied: Callable[..., KVCache], tokens: int
) -> None:
    cache = MAKE[kind]()
    appended(kind, cache, drawn(tokens))
    twin, third = copied(cache), copied(cache)
    assert (len(twin), twin.kept, twin.forgotten) == (len(cache), cache.kept, cache.forgotten)
    appended(kind, third, -drawn(3))
    for found, wanted in zip(appended(kind, twin, drawn(4)), appended(kind, cache, drawn(4)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("received", "described"), [(3, "format 3"), (0, "format 0"), (None, "no format"), (True, "format True")]
)
def test_another_format_is_refused_and_the_error_says_what_to_do(received, described, monkeypatch):
    inside = KVCache().__getstate__()
    monkeypatch.setattr(KVCache, "__getstate__", lambda self: {**inside, "format": received})
    data = pickle.dumps(KVCache())
    message = (
        f"the pickled KVCache has {described} but this version of alibi-attn reads format 1 and 2; unpickle it with the"
    )
    with pytest.raises(ValueError, match=message):
        pickle.loads(data)


def old(kind: str) -> bytes:
    return zlib.decompress(base64.b85decode(OLD[kind]))


def test_old_pickles_open() -> None:
    assert module.FORMAT == 1
    whole, stream, gates = (pickle.loads(old(kind)) for kind in ("all", "stream", "gates"))
    assert whole.key[0, 0, :, 1].tolist() == (-whole.value)[0, 0, :, 0].tolist() == [0, 1, 2]
    assert stream.key[0, 0, :, 0].tolist() == [0, 3, 4]
    assert (stream.max_tokens, stream.sinks, stream.forgotten) == (3, 1, (2,))
    assert gates.log_fgate[0].tolist() == [[0, -1, -2]] * 2
    assert gates.value.shape == (1, 1, 3, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="caches in files need Linux or macOS")
def test_an_old_file_opens_and_continues(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(old("file"))
    cache = KVCache.open(tmp_path / "cache")
    cache.verify()
    more = torch.full((1, 1, 1, 2), 73.0)
    with torch.no_grad():
        cache.append(more, -more)
    numbers = [*range(70), 0, 1, 2, 73]
    assert cache.key[0, 0, :, 0].tolist() == (-cache.value)[0, 0, :, 1].tolist() == numbers
    del cache
    KVCache.open(tmp_path / "cache").verify()
