"""Calls in parts in JAX against dense masks in fp64 (`support/oracles/parts_oracle.py`): outputs, lse, and all gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_checks import BACKENDS, draw, fixture_of_tiles
from parts_oracle import truth

from alibi_attn.attention import api
from alibi_attn.jax import alibi_attention, explain

small_tiles = fixture_of_tiles(16, 16, autouse=True)
SLOPES = np.float32([1.0, 0.5, 0.1, 0.02])
PREFIX = np.int32([7, 50])
MASK = np.random.default_rng(3).random((2, 60)) < 0.8
SEGMENTS = np.sort(np.random.default_rng(4).integers(0, 3, (2, 60)), -1)
STAMPS = (np.random.default_rng(6).random((2, 60)) * np.array([1, 0, 1, 3, 0, 1] * 10)).cumsum(-1).astype(np.float32)
BIAS = draw(2, 4, 60, seed=5)
BETWEEN = STAMPS[:, 20:] + np.diff(STAMPS[:, 20:], append=STAMPS[:, -1:]) / 2  # each query lies before the next key
# Of times, before and after all keys.
GRID = np.linspace(-3.0, 90.0, 40, dtype=np.float32) * np.ones((2, 1), np.float32)
GRID[:, 20] = np.sort(STAMPS)[:, 30]  # one is at a key
GRID.sort(-1)

CASES = [
    {"prefix_len": PREFIX},
    {"prefix_len": PREFIX, "window": 9, "segment_ids": SEGMENTS, "key_bias": BIAS},
    {"prefix_len": np.int32([60, 0]), "key_mask": MASK, "query_offset": 3},
    {"window": [5, 9, 400, 9], "key_bias": BIAS},
    {"window": [9, 9, 30, 30], "causal": False, "right_slopes": [0.1, 0.3, 0.0, 1.0], "segment_ids": SEGMENTS},
    {"window": 9, "sinks": 3, "key_mask": MASK},
    {"positions": STAMPS},
    {"positions": STAMPS, "query_positions": STAMPS[:, 20:] + np.float32(0.25), "key_bias": BIAS},
    {"positions": STAMPS, "causal": False, "right_slopes": [0.1, 0.3, 0.0, 1.0], "key_mask": MASK},
    {"positions": STAMPS, "window": [5, 9, 400, 9], "sinks": 3, "prefix_len": PREFIX},
    {"positions": STAMPS, "query_positions": BETWEEN, "prefix_len": PREFIX, "window": 9},
    {
        "positions": STAMPS,
        "query_positions": GRID,
        "causal": False,
        "right_slopes": [0.1, 0.3, 0.0, 1.0],
        "key_mask": MASK,
    },
    {"positions": STAMPS, "query_positions": GRID, "causal": False, "key_bias": BIAS},
    {"window": 7, "sinks": 25, "causal": False},
    {"window": [5, 9, 400, 9], "sinks": 3, "prefix_len": PREFIX, "query_offset": 11},
]


def drawn() -> list[np.ndarray]:
    return [*(draw(2, n, h, 16, seed=n + h) for n, h in ((40, 4), (60, 2), (60, 2))), SLOPES]


def in_fp64(options: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """([output, lse], gradients of the sum of sin(output)·(1 + sin(lse))) in JAX's layout."""
    q, k, v, slopes = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in drawn())
    given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    output, lse = truth(*(x.transpose(1, 2) for x in (q, k, v)), slopes, **given)
    output = output.transpose(1, 2)
    loss = output.sin().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    return [output.detach(), lse.detach()], list(torch.autograd.grad(loss, [q, k, v, slopes]))


def loss(q, k, v, slopes, **options):
    output, lse = alibi_attention(q, k, v, slopes, return_lse=True, **options)
    return jnp.sin(output).sum() + jnp.sin(jnp.where(jnp.isinf(lse), 0.0, lse)).sum(), (output, lse)


def cases() -> list:
    """Each option in each backend; what takes XLA long to compile is for the long tests."""
    slow = [options for options in CASES if (len(options) > 1 and "sinks" not in options) or "prefix_len" in options]
    slow = {"native": [], "dense": [x for x in CASES if len(x) > 2], "loop": slow[1:]}
    return [
        pytest.param(
            backend,
            options,
            id=f"{backend}-{'-'.join(options)}",
            marks=[pytest.mark.long] if any(options is one for one in slow[backend]) else [],
        )
        for backend in BACKENDS
        for options in CASES
    ]


@pytest.mark.parametrize(("backend", "options"), cases())
def test_results_and_gradients_are_those_of_dense_masks(backend: str, options: dict) -> None:
    expected, gradients = in_fp64(options)
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    others = {name: x for name, x in options.items() if name not in arrays}
    step = jax.jit(partial(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), backend=backend, **others))
    (_, found), of_found = step(*drawn(), **arrays)
    for got, wanted in zip((*found, *of_found), (*expected, *gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=5e-5 if wanted.ndim == 1 else 5e-6)


def test_a_call_without_jit_or_under_vmap_is_the_same() -> None:
    q, k, v, slopes = drawn()
    together = alibi_attention(q, k, v, slopes, prefix_len=PREFIX)
    alone = jax.vmap(lambda q, k, v, n: alibi_attention(q[None], k[None], v[None], slopes, prefix_len=n[None])[0])
    np.testing.assert_allclose(together, alone(q, k, v, PREFIX), rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_no_key_gives_zeros_and_zero_gradients() -> None:
    q, k, v, slopes = drawn()

    def masked(q, k, v, slopes):
        output, lse = alibi_attention(
            q, k, v, slopes, prefix_len=PREFIX, key_mask=np.zeros((2, 60), bool), return_lse=True
        )
        return output.sum() * jnp.nan, (output, lse)

    gradients, (output, lse) = jax.grad(masked, (0, 1, 2, 3), has_aux=True)(q, k, v, slopes)
    assert bool((output == 0).all())
    assert bool((lse == -jnp.inf).all())
    assert all(bool((x == 0).all()) for x in gradients)


@pytest.mark.parametrize("window", [np.array([5, 9, 400, 9]), jnp.array([5, 9, 400, 9])], ids=["numpy", "jax"])
def test_windows_per_head_may_be_an_array_that_is_not_traced(window) -> None:
    q, k, v, slopes = drawn()
    by_list = alibi_attention(q, k, v, slopes, window=[5, 9, 400, 9])
    assert bool((alibi_attention(q, k, v, slopes, window=window) == by_list).all())
    with pytest.raises(TypeError, match="traced or on another device; pass a list of integers"):
        jax.jit(lambda window: alibi_attention(q, k, v, slopes, window=window))(window)


@pytest.mark.parametrize("sinks", [60, 99])
def test_sinks_may_be_all_keys(sinks: int) -> None:
    q, k, v, slopes = drawn()
    all_keys = alibi_attention(q, k, v, slopes)
    np.testing.assert_allclose(alibi_attention(q, k, v, slopes, window=3, sinks=sinks), all_keys, atol=1e-6)
    without_window = alibi_attention(q, k, v, slopes, sinks=sinks)
    assert bool((without_window == all_keys).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_in_fp32_keep_the_digits_of_large_positions(backend: str) -> None:
    q, k, v, slopes = drawn()
    stamps = np.float32(1e6) + np.float32(0.125) * np.arange(60, dtype=np.float32) * np.ones((2, 1), np.float32)
    stamps[:, :30] -= np.float32(9e5)
    (expected, _), _ = in_fp64({"positions": stamps})
    found = alibi_attention(q, k, v, slopes, positions=stamps, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    seconds = 1.7e9 + stamps.astype(np.float64)
    assert bool((alibi_attention(q, k, v, slopes, positions=seconds, backend=backend) == found).all())


@pytest.mark.parametrize("backend", ["native", pytest.param("dense", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options", [{"prefix_len": PREFIX}, {"positions": STAMPS, "causal": False}], ids=["prefix", "positions"]
)
def test_large_key_biases_cost_merged_parts_no_digits(backend: str, options: dict) -> None:
    options = options | {"key_bias": np.float32(1e6) + BIAS.round()}
    (expected, _), _ = in_fp64(options)
    found = alibi_attention(*drawn(), backend=backend, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)


def test_infinite_right_slopes_hide_the_right_also_by_position() -> None:
    q, k, v, slopes = drawn()
    step = jax.value_and_grad(lambda m, **given: alibi_attention(q, k, v, m, positions=STAMPS, **given).sum())
    both = step(slopes, causal=False, right_slopes=[jnp.inf] * 4)
    for got, wanted in zip(both, step(slopes), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def test_a_gradient_of_positions_is_refused() -> None:
    q, k, v, slopes = drawn()
    with pytest.raises(ValueError, match=r"pass jax.lax.stop_gradient\(positions\)"):
        jax.grad(lambda positions: alibi_attention(q, k, v, slopes, positions=positions).sum())(jnp.asarray(STAMPS))


def test_a_low_precision_output_keeps_its_dtype() -> None:
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in drawn()[:3])
    output, lse = alibi_attention(q, k, v, SLOPES, prefix_len=PREFIX, return_lse=True)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "options",
    [{"prefix_len": PREFIX, "window": [64, 64, 500, 500], "sinks": 4}, {"query_positions": GRID, "causal": False}],
    ids=["prefix and windows", "queries anywhere"],
)
def test_explain_says_of_parts_what_it_says_of_tensors(options: dict) -> None:
    """PyTorch leaves out keys that a prefix cannot show, so the blocks of the keys to the right begin elsewhere."""
    drawn = [draw(2, n, h, 16, seed=h) for n, h in ((300, 4), (330, 2), (330, 2))]
    at = np.arange(330.0) * np.ones((2, 1))
    options = {n: at[:, 30:] - 0.3 if n == "query_positions" else x for n, x in options.items()}
    options |= {"positions": at} if "query_positions" in options else {}
    found = explain(*drawn, SLOPES, backend="native", **options)
    given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    tensors = (torch.from_numpy(x).transpose(1, 2) for x in drawn)
    expected = api.explain(*tensors, torch.from_numpy(SLOPES), backend="native", **given)
    assert (found.call, found.visible, found.verdicts["native"]) == (
        expected.call,
        expected.visible,
        "runs (named by the caller)",
    )
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0.02)
    np.testing.assert_allclose(found.reaches, expected.reaches, atol=64)
    assert found.share < explain(*drawn, SLOPES, backend="dense", **options).share
