"""Pickles and files of caches: what each format holds, other formats are refused by name, old ones open."""

import base64
import json
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("tokens", [0, 5])
@torch.no_grad()
def test_a_pickle_holds_what_its_format_says(kind: str, tokens: int) -> None:
    cache = MAKE[kind]()
    for token in torch.randn(tokens, 1, 2, 1, 4):
        cache.append(token, token, *[-token.abs()[..., 0]] * ("gates" in kind))
    state = cache.__getstate__()
    assert state["format"] == (1 if kind in ("all", "stream", "gates") else 2)
    assert list(state) == HOLDS[state["format"]]


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
