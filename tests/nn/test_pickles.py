"""A pickled cache contains its format number; any other format is refused by name, with what to do."""

import pickle

import pytest
import torch

from alibi_attn.nn.cache import FORMAT, KVCache
from alibi_attn.nn.gated_cache import GatedReachCache
from alibi_attn.nn.reach_cache import CachesOfHeads, ReachCache

# What a pickle of each format holds. To change it, raise the number and add a line, or keep reading the older one.
HOLDS = {
    (KVCache, 1): ["format", "max_tokens", "sinks", "forgotten", "key", "value", "gates"],
    (ReachCache, 1): [
        "format",
        "key_heads",
        "query_heads",
        "score_bound",
        "tolerance",
        "_caches",
        "_seen",
        "_longest_key",
        "_limits",
        "_num_kv_heads",
    ],
    (GatedReachCache, 1): [
        "format",
        "slopes",
        "key_heads",
        "query_heads",
        "score_bound",
        "tolerance",
        "_caches",
        "_seen",
        "_longest_key",
        "_gone",
        "_since",
    ],
}
MAKE = {
    KVCache: KVCache,
    ReachCache: lambda: ReachCache([2, 9], score_bound=3.0, tolerance=1e-6),
    GatedReachCache: lambda: GatedReachCache([0.5, 0.0], score_bound=3.0, tolerance=1e-6, num_kv_heads=2),
}


def filled(kind: type) -> KVCache | ReachCache:
    cache = MAKE[kind]()
    with torch.no_grad():
        for token in torch.randn(5, 1, 2, 1, 4, generator=torch.Generator().manual_seed(0)):
            gates = (-token.abs()[..., 0],) if kind is GatedReachCache else ()
            cache.append(token, token, *gates)
    return cache


@pytest.mark.parametrize(("kind", "number"), HOLDS)
@pytest.mark.parametrize("make", [filled, lambda kind: MAKE[kind]()], ids=["filled", "empty"])
def test_a_pickle_holds_what_its_format_says(kind, number, make):
    state = make(kind).__getstate__()
    assert state["format"] == number == (FORMAT if kind is KVCache else CachesOfHeads.FORMAT)
    assert list(state) == HOLDS[kind, number]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    ("received", "described"), [(2, "format 2"), (0, "format 0"), (None, "no format"), (True, "format True")]
)
def test_another_format_is_refused_and_the_error_says_what_to_do(kind, received, described, monkeypatch):
    cache = filled(kind)
    inside = cache.__getstate__()
    monkeypatch.setattr(kind, "__getstate__", lambda self: {**inside, "format": received})
    data = pickle.dumps(cache)
    message = f"the pickled {kind.__name__} has {described} but this version of alibi-attn reads format 1; unpickle it with the"
    with pytest.raises(ValueError, match=message):
        pickle.loads(data)


def test_a_pickle_from_before_formats_is_refused_by_name(monkeypatch):
    """Such a pickle held every attribute, including bounds of norms that the current certificate may not accept."""
    cache = filled(KVCache)
    monkeypatch.setattr(KVCache, "__getstate__", lambda self: {**vars(self), "_layer": None})
    data = pickle.dumps(cache)
    with pytest.raises(ValueError, match="the pickled KVCache has no format"):
        pickle.loads(data)


def test_a_pickled_stream_keeps_its_count_of_forgotten_tokens():
    cache = KVCache(max_tokens=4, sinks=1)
    with torch.no_grad():
        for step in range(9):
            cache.append(*torch.full((2, 1, 1, 1, 4), float(step)))
    twin = pickle.loads(pickle.dumps(cache))
    assert (len(twin), twin.forgotten, twin.max_tokens, twin.sinks) == (4, 5, 4, 1)
    assert twin.key[0, 0, :, 0].tolist() == cache.key[0, 0, :, 0].tolist() == [0, 6, 7, 8]
