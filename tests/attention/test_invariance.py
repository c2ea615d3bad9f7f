"""The same bits: for a row alone and in a batch, and for a text and its continuation (docs/backends.md says where)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_checks import ON_CPU, WITH_KEY_BIAS
from torch import Tensor
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, forgetting_attention

B, H, K, S, D = 3, 4, 2, 200, 16
DTYPES = (torch.float32, *(pytest.param(x, marks=pytest.mark.long) for x in (torch.bfloat16, torch.float64)))
# Options of a call, with a number, mask or bias for each row; from a generator.
OPTIONS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "plain": lambda g: {},
    "holes": lambda g: {"key_mask": torch.rand(B, S, generator=g) < 0.7},
    "left padding": lambda g: {"key_mask": torch.arange(S) >= torch.tensor([[0], [90], [150]])},
    "segments": lambda g: {"segment_ids": torch.randint(0, 3, (B, S), generator=g).sort(1).values},
    "window": lambda g: {"window": 70},
    "slopes per row": lambda g: {"slopes": torch.rand(B, H, generator=g)},
    "symmetric": lambda g: {"causal": False},
    "key bias": lambda g: {"key_bias": 3 * torch.randn(B, H, S, generator=g)},
    "gates": lambda g: {"log_fgate": logsigmoid(torch.randn(B, H, S, generator=g) + 2)},
}
OPTIONS["gates, segments and left padding"] = lambda g: {
    **OPTIONS["gates"](g),
    **OPTIONS["segments"](g),
    **OPTIONS["left padding"](g),
}
BIASED = ("key bias", "gates", "gates, segments and left padding")


def attend(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], **options: Any) -> list[Tensor]:
    given = dict(given)
    slopes, gates = given.pop("slopes", None), given.pop("log_fgate", None)
    if gates is None:
        return list(alibi_attention(query, key, value, slopes, return_lse=True, **given, **options))
    return list(forgetting_attention(query, key, value, gates, slopes, return_lse=True, **given, **options))


def gradients(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], **options: Any) -> list[Tensor]:
    """Of output and lse, for everything that has rows."""
    names = [name for name in ("key_bias", "log_fgate", "slopes") if name in given]
    inputs = [x.detach().requires_grad_() for x in (query, key, value, *(given[name] for name in names))]
    found = attend(*inputs[:3], given | dict(zip(names, inputs[3:], strict=True)), **options)
    return list(torch.autograd.grad(found, inputs, [x.detach().cos() for x in found]))


def drawn(words: str, dtype: torch.dtype, *, queries: int = S) -> tuple[list[Tensor], dict[str, Any]]:
    """Rows whose scores differ by a factor of 100, and their options."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(B, H, queries, D, generator=generator) * torch.tensor([0.1, 1.0, 10.0])[:, None, None, None]
    key, value = torch.randn(2, B, K, S, D, generator=generator)
    return [x.to(dtype) for x in (query, key, value)], OPTIONS[words](generator)


def assert_rows_alone(inputs: list[Tensor], given: dict[str, Any], backend: str, *, compute: Any = attend) -> None:
    whole = compute(*inputs, given, backend=backend)
    for row in range(B):
        at = slice(row, row + 1)
        own = {name: x[at] if isinstance(x, Tensor) else x for name, x in given.items()}
        for x, y in zip(whole, compute(*(x[at] for x in inputs), own, backend=backend), strict=True):
            assert torch.equal(x[at], y), f"row {row} is off by {float((x[at] - y).abs().nan_to_num().max()):.1e}"


@torch.no_grad()
@pytest.mark.parametrize("queries", [S, 1], ids=["all queries", "a decoding step"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("words", OPTIONS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(backend, words, dtype, queries):
    if words in BIASED and backend not in WITH_KEY_BIAS:
        pytest.skip(f"{backend} has no key bias")
    assert_rows_alone(*drawn(words, dtype, queries=queries), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("words", OPTIONS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_rows_gradients_have_the_same_bits_alone_and_in_a_batch(backend, words, dtype):
    if words in BIASED and backend not in WITH_KEY_BIAS:
        pytest.skip(f"{backend} has no key bias")
    assert_rows_alone(*drawn(words, dtype), backend, compute=gradients)


@torch.no_grad()
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_neighbor_with_nan_changes_no_bits(backend):
    (query, key, value), given = drawn("plain", torch.float32)
    key[0, 0, 3] = torch.nan
    whole = attend(query, key, value, given, backend=backend)[0]
    alone = attend(query[1:2], key[1:2], value[1:2], given, backend=backend)[0]
    assert torch.equal(whole[1:2], alone)
    assert bool(whole[0].isnan().any())


def test_other_bits_are_detected():
    """Each call draws its own dropout."""
    inputs, given = drawn("plain", torch.float32)
    with pytest.raises(AssertionError, match="row 0 is off by"):
        assert_rows_alone(inputs, given | {"dropout_p": 0.5}, "reference")


CAUSAL = [words for words in OPTIONS if words not in (*BIASED, "symmetric")]


# (first query, one after the last, number of keys): prefixes, chunks at any place, single steps.
CALLS = (
    (0, 1, 1),
    (0, 65, 65),
    (0, 129, 129),
    (0, 199, 199),
    (37, 150, 150),
    (64, 129, 200),
    (150, 151, 151),
    (199, 200, 200),
)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("words", CAUSAL)
def test_an_invariant_query_has_the_same_bits_in_every_call(words, dtype):
    """Those that see their own key: after the last visible key, distances are relative to that key."""
    inputs, given = drawn(words, dtype)
    sees_itself = given.get("key_mask", torch.ones(B, S, dtype=torch.bool))
    given = {"slopes": [0.7, 0.3, 0.1, 0.01], **given}  # products with distances are rounded
    whole = attend(*inputs, given, invariant=True)
    inputs[1][1:, :, 199], inputs[2][1:, :, 199] = torch.nan, torch.inf  # a later key
    for first, end, keys in CALLS:
        rows = slice(0, 1) if end == 200 else slice(None)  # where no query sees that key
        own = {name: x[:, :keys] if name in ("key_mask", "segment_ids") else x for name, x in given.items()}
        own = {name: x[rows] if isinstance(x, Tensor) else x for name, x in own.items()}
        query, key, value = inputs[0][rows, :, first:end], *(x[rows, :, :keys] for x in inputs[1:])
        part = attend(query, key, value, own, query_offset=first, invariant=True)
        for x, y in zip(whole, part, strict=True):
            same = (x[rows, :, first:end] == y).reshape(*y.shape[:3], -1).all(-1)
            assert bool(same.transpose(1, 2)[sees_itself[rows, first:end]].all()), (
                f"queries {first} to {end} of {keys} keys"
            )


def test_what_a_certificate_skips_depends_on_later_queries():
    """So `invariant` is not merely the name of what happens anyway."""
    inputs, given = drawn("plain", torch.float32)
    whole = attend(*inputs, given, backend="native", tolerance=1e-3)
    part = attend(*(x[:, :, :129] for x in inputs), given, backend="native", tolerance=1e-3)
    assert not torch.equal(whole[0][:, :, :129], part[0])
