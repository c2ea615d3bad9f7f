"""Runs the JAX function on a case, for comparison with the same truth by the same checker as PyTorch's backends.

Also the inputs, small tiles and comparisons that several test files of JAX share.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_cases import Case
from attention_checks import arguments
from attention_oracle import Answer, positions

from alibi_attn.jax import attention
from alibi_attn.jax.attention import alibi_attention

BACKENDS = ("native", "dense", "loop")
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def fixture_of_tiles(queries: int, keys: int, *, autouse: bool) -> object:
    """A fixture that makes blocks and tiles this small, so that short input has many."""

    @pytest.fixture(autouse=autouse)
    def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "QUERY_BLOCK", queries)
        monkeypatch.setattr(attention, "KEY_TILE", keys)

    return small_tiles


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Numpy arrays, so that collecting tests initializes no device."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(got: object, expected: object) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def loss(*arrays: jax.Array, **options: object) -> jax.Array:
    """A number that depends on output and lse."""
    output, lse = alibi_attention(*arrays, return_lse=True, **options)
    return (jnp.sin(output) * output).sum() + jnp.cos(lse).sum()


@dataclasses.dataclass(frozen=True)
class Room:
    """A shape that many cases fit into, because compilation dominates the time here."""

    batch: int
    kv_heads: int
    group: int
    query_len: int
    key_len: int
    head_dim: int

    def holds(self, case: Case) -> bool:
        kv_heads = case.kv_heads or case.heads
        return (
            case.batch <= self.batch
            and kv_heads <= self.kv_heads
            and case.heads // kv_heads <= self.group
            and case.query_len <= self.query_len
            and case.key_len <= self.key_len
            and case.head_dim <= self.head_dim
        )


SMALL = Room(batch=3, kv_heads=6, group=4, query_len=24, key_len=32, head_dim=8)
LONG = Room(batch=2, kv_heads=4, group=2, query_len=304, key_len=304, head_dim=16)
BIASED = Room(batch=2, kv_heads=2, group=2, query_len=500, key_len=500, head_dim=8)


def answer(case: Case, dtype: str = "float32", **extra: object) -> Answer:
    """Output, lse and all gradients of one call, in the case's shapes."""
    (*rows, slopes), options = arguments(case, torch.float64)
    wide = "float64" if dtype == "float64" else "float32"
    arrays = {name: _jax_layout(x.numpy(), dtype) for name, x in zip(("query", "key", "value"), rows, strict=True)}
    leaves = {"slopes": slopes} | {name: options.pop(name) for name in ("right_slopes", "key_bias") if name in options}
    arrays |= {name: jnp.asarray(x.numpy(), wide) for name, x in leaves.items()}
    kwargs = jax.tree.map(lambda x: jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x, options) | extra
    drawn = case.draw()
    return _answer(arrays, kwargs, (_jax_layout(drawn["grad_output"], dtype), jnp.asarray(drawn["grad_lse"], wide)))


def embedded_answer(case: Case, room: Room, dtype: str = "float32", **extra: object) -> Answer:
    """The same results from a call in the shapes of `room`.

    Additional sequences, heads, queries and columns are noise or zero and do not affect the case; additional keys are
    hidden, and NaN. If the case has no window or segments, a window that hides nothing and a single segment are passed.
    """
    drawn = case.draw()
    wide = "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(1)
    kv_heads = case.kv_heads or case.heads
    group = case.heads // kv_heads
    heads = [h // group * room.group + h % group for h in range(case.heads)]  # indices of the case's heads
    b, t, s, d = case.batch, case.query_len, case.key_len, case.head_dim

    def of_heads(x: np.ndarray, like: np.ndarray) -> np.ndarray:
        index = np.ix_(range(b), heads, *map(range, x.shape[2:]))
        like[index] = x
        return like

    many = (room.batch, room.kv_heads * room.group)
    query = rng.standard_normal((*many, room.query_len, room.head_dim))
    query[..., d:] = 0
    key = np.full((room.batch, room.kv_heads, room.key_len, room.head_dim), np.nan)
    key[:b, :kv_heads, :s] = 0
    value = key.copy()
    key[:b, :kv_heads, :s, :d], value[:b, :kv_heads, :s, :d] = drawn["key"], drawn["value"]
    mask = np.zeros((room.batch, room.key_len), bool)
    mask[:b, :s] = True if drawn["key_mask"] is None else drawn["key_mask"]
    of_query, of_key = np.zeros((room.batch, room.query_len), int), np.zeros((room.batch, room.key_len), int)
    if drawn["key_segments"] is not None:
        of_key[:b, :s] = drawn["key_segments"]
        own = drawn["query_segments"]
        of_query[:b, :t] = np.take_along_axis(drawn["key_segments"], positions(case, drawn), 1) if own is None else own
    offset = np.zeros(room.batch, int)
    offset[:b] = positions(case, drawn)[:, 0]

    arrays = {
        "query": _jax_layout(of_heads(drawn["query"], query), dtype),
        "key": _jax_layout(key, dtype),
        "value": _jax_layout(value, dtype),
        "slopes": jnp.asarray(of_heads(np.broadcast_to(drawn["slopes"], (b, case.heads)), np.full(many, 0.3)), wide),
    }
    if case.right:
        right = np.broadcast_to(drawn["right_slopes"], (b, case.heads))
        arrays["right_slopes"] = jnp.asarray(of_heads(right, np.full(many, 0.3)), wide)
    if case.key_bias:
        padded = np.pad(drawn["key_bias"], [(0, 0)] * (drawn["key_bias"].ndim - 1) + [(0, room.key_len - s)])
        bias = np.broadcast_to(padded, (b, case.heads, room.key_len))
        arrays["key_bias"] = jnp.asarray(of_heads(bias, rng.standard_normal((*many, room.key_len))), wide)
    kwargs: dict[str, object] = {
        "causal": case.causal,
        "window": case.window or 10_000,
        "scale": d**-0.5 if case.scale is None else case.scale,
        "query_offset": jnp.asarray(offset),
        "key_mask": jnp.asarray(mask),
        "segment_ids": (jnp.asarray(of_query), jnp.asarray(of_key)),
    } | extra
    grad_output = of_heads(drawn["grad_output"], np.zeros((*many, room.query_len, room.head_dim)))
    grad_lse = of_heads(drawn["grad_lse"], np.zeros((*many, room.query_len)))
    big = _answer(arrays, kwargs, (_jax_layout(grad_output, dtype), jnp.asarray(grad_lse, wide)))

    def of_slopes(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x[:b, heads]
        return x.sum(0) if drawn[name].ndim == 1 else x

    gradients = {
        "query": big.gradients["query"][:b, heads, :t, :d],
        "key": big.gradients["key"][:b, :kv_heads, :s, :d],
        "value": big.gradients["value"][:b, :kv_heads, :s, :d],
        "slopes": of_slopes(big.gradients["slopes"], "slopes"),
    }
    if case.right:
        gradients["right_slopes"] = of_slopes(big.gradients["right_slopes"], "right_slopes")
    if case.key_bias:
        of_bias = big.gradients["key_bias"][:b, heads, :s]
        gradients["key_bias"] = of_bias.sum_to_size(drawn["key_bias"].shape)
    return Answer(big.output[:b, heads, :t, :d], big.lse[:b, heads, :t], gradients)


def _answer(arrays: dict[str, jax.Array], kwargs: dict[str, object], grads: tuple[jax.Array, jax.Array]) -> Answer:
    def call(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return alibi_attention(**arrays, **kwargs, return_lse=True)

    (output, lse), pull = jax.vjp(call, arrays)
    (found,) = pull(grads)
    gradients = {n: _torch(g, transposed=n in ("query", "key", "value")) for n, g in found.items()}
    return Answer(_torch(output, transposed=True), _torch(lse), gradients)


def _jax_layout(x: np.ndarray, dtype: str) -> jax.Array:
    """[B, H, T, D] -> [B, T, H, D]."""
    return jnp.asarray(np.swapaxes(x, 1, 2), dtype)


def _torch(x: jax.Array, *, transposed: bool = False) -> torch.Tensor:
    dtype = TORCH[str(x.dtype)]
    tensor = torch.tensor(np.asarray(x, np.float64)).to(dtype)
    return tensor.transpose(1, 2) if transposed else tensor
