"""The JAX function computes the definition: the cases, the truth and the checker are those of PyTorch's backends."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_cases import CASES, KEY_BIASES, ONE_FAR_KEY, Case
from attention_checks import EPS, assert_exact, assert_one_far_key
from jax_checks import BACKENDS, BIASED, LONG, SMALL, TORCH, Room, answer, draw, embedded_answer, fixture_of_tiles

from alibi_attn.jax import alibi_attention, attention

CASE = {case.name: case for case in CASES}
small_tiles = fixture_of_tiles(7, 5, autouse=False)  # blocks that do not divide the length


def once_or_more(cases: Sequence[Case]) -> list[object]:
    """(backend, case): kernels with all cases, XLA backends with every sixth, and with the others in long tests."""
    return [
        pytest.param(
            backend, case, marks=() if backend == "native" or n % 6 == 0 else pytest.mark.long, id=f"{backend}-{case}"
        )
        for backend in BACKENDS
        for n, case in enumerate(cases)
    ]


# Also run in their own shapes, with tiles of the usual size: one per kind of argument. The last only tests tiles.
OWN_SHAPES = ("one query", "packed segments, symmetric, mask", "steep, long")


def room_of(case: Case) -> Room | None:
    rooms = (SMALL, BIASED) if case.key_bias else (SMALL, LONG)
    return next((room for room in rooms if room.holds(case)), None)


def assert_same(case: Case, dtype: str, **how: object) -> None:
    room = None if how.get("backend") == "native" else room_of(case)  # the kernels need no compilation per shape
    got = answer(case, dtype, **how) if room is None else embedded_answer(case, room, dtype, **how)
    assert_exact(case, TORCH[dtype], got, tolerance=EPS[TORCH[dtype]] / 32)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("backend", "case"), once_or_more(CASES))
def test_every_case_equals_the_definition(backend: str, case: Case) -> None:
    assert_same(case, "float32", backend=backend)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("backend", "case"), once_or_more([case for case in KEY_BIASES if SMALL.holds(case)]))
def test_a_bias_per_key_equals_the_definition(backend: str, case: Case) -> None:
    assert_same(case, "float32", backend=backend)


@pytest.mark.parametrize("case", [case for case in KEY_BIASES if not SMALL.holds(case)], ids=str)
@pytest.mark.parametrize("backend", ["native", pytest.param("loop", marks=pytest.mark.long)])
def test_a_bias_per_key_of_long_input_equals_the_definition(
    backend: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 33)
    monkeypatch.setattr(attention, "KEY_TILE", 24)
    assert_same(case, "float32", backend=backend)


@pytest.mark.parametrize("case", ONE_FAR_KEY[-1:], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_far_key_gives_the_slope_no_gradient_but_through_lse(backend: str, case: Case) -> None:
    assert_one_far_key(case, answer(case, "float32", backend=backend))


@pytest.mark.parametrize(("backend", "name"), [*(("loop", name) for name in OWN_SHAPES), ("dense", OWN_SHAPES[0])])
def test_cases_in_their_own_shapes_equal_the_definition(backend: str, name: str) -> None:
    assert_exact(CASE[name], torch.float32, answer(CASE[name], backend=backend), tolerance=EPS[torch.float32] / 32)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("dtype", "backend", "names"),
    [
        *((dtype, "native", ("everything", "symmetric", "steep, long, sink, peaked")) for dtype in TORCH),
        ("bfloat16", "dense", ("everything", "symmetric", "heads that never look right")),
        ("bfloat16", "loop", ("everything", "symmetric", "heads that never look right")),
        ("float64", "dense", ("everything",)),
        ("float64", "loop", ("steep, long, segments",)),
        *(
            pytest.param(dtype, backend, names, marks=pytest.mark.long)
            for dtype, backend, names in (
                ("bfloat16", "loop", ("steep, long", "steep, long, sink, peaked")),
                ("float16", "loop", ("everything", "symmetric", "heads that never look right")),
                ("float64", "dense", ("symmetric", "heads that never look right")),
                ("float64", "loop", ("steep, long", "steep, long, sink, peaked")),
            )
        ),
    ],
)
def test_other_dtypes_equal_the_definition(dtype: str, backend: str, names: tuple[str, ...]) -> None:
    with jax.enable_x64(dtype == "float64"):
        for name in names:
            assert_same(CASE[name], dtype, backend=backend)


def test_the_checker_fails_on_wrong_answers() -> None:
    case = Case("checked", window=5, offset=6, query_len=7, key_len=13)
    for changes in ({"window": 6}, {"offset": 5}, {"causal": False}, {"slopes": "steep"}, {"seed": 1}):
        wrong = embedded_answer(dataclasses.replace(case, **changes), SMALL, backend="dense")
        with pytest.raises(AssertionError):
            assert_exact(case, torch.float32, wrong)


@pytest.mark.parametrize("factor", [2**32, -(2**40), -(2**62)])
def test_segment_ids_that_int32_cannot_hold_stay_distinct(factor: int) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 6, 1, 4)).astype(np.float32) for _ in range(3))
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    small = attention.alibi_attention(query, key, value, segment_ids=ids)
    for large in (ids * factor, (ids * factor, ids * factor)):
        assert np.array_equal(attention.alibi_attention(query, key, value, segment_ids=large), small)
    with pytest.raises(ValueError, match="do not fit int32"):
        attention.alibi_attention(query, key, value, segment_ids=(jax.numpy.asarray(ids), ids * factor))


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_of_queries_and_keys_may_overflow_before_they_are_scaled(backend: str) -> None:
    query, key = jnp.full((1, 1, 1, 2), 1e19), jnp.array([1e20, 9.995e19])[None, :, None, None] * jnp.ones((1, 2, 1, 2))
    value = jnp.array([1.0, 3.0])[None, :, None, None] * jnp.ones((1, 2, 1, 2))

    def first(query: jax.Array, key: jax.Array) -> jax.Array:
        return alibi_attention(query, key, value, [0.0], scale=1e-36, backend=backend)[0, 0, 0, 0]

    near, far = (float(x) for x in jax.nn.softmax(jnp.array([2000.0, 1999.0])))
    output, (of_query, of_key) = jax.value_and_grad(first, (0, 1))(query, key)
    pull = near * far * (1.0 - 3.0)  # of the first score; minus that of the second
    np.testing.assert_allclose(output, near + 3.0 * far, rtol=1e-3)
    np.testing.assert_allclose(of_query[0, 0, 0] * 1e19, [pull * 0.5] * 2, rtol=3e-3)
    np.testing.assert_allclose(of_key[0, :, 0] * 1e20, [[pull * 1e3] * 2, [-pull * 1e3] * 2], rtol=3e-3)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_times_distances_may_overflow(backend: str) -> None:
    """The nearest key that a query sees has all the weight; one with NaN in it still returns NaN."""
    query, key, value = (draw(1, 12, 1, 4, seed=seed) for seed in range(3))
    mask = np.arange(12)[None] < 3
    output = alibi_attention(query, key, value, [3e38], key_mask=mask, backend=backend)
    np.testing.assert_array_equal(output, value[:, np.minimum(np.arange(12), 2)])
    away = alibi_attention(query, key, value, [3e38], causal=False, query_offset=-500, backend=backend)
    np.testing.assert_array_equal(away, value[:, [0] * 12])
    query[0, 7, 0, 1] = np.nan
    spoiled = alibi_attention(query, key, value, [3e38], key_mask=mask, backend=backend)
    np.testing.assert_array_equal(np.isnan(spoiled[0, :, 0, 0]), np.arange(12) == 7)
