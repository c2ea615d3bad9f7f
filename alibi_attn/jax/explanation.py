"""`explain` for JAX arrays: which backend runs a call and why, how far each head attends, and the certified bound."""

from typing import Unpack

import jax
import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.attention.explain import Explanation, explanation, verdict_on
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.jax import attention, native
from alibi_attn.jax.attention import Backend
from alibi_attn.jax.operands import operands
from alibi_attn.jax.plan import Array, Plan
from alibi_attn.jax.plan import Visited as VisitedTiles
from alibi_attn.jax.validation import AttentionOptions, Slopes, check_without_parts, make_spec

Spec = AttentionSpec[Array]
ROWS = 256  # queries whose pairs are counted at a time


def explain(
    query: Array,
    key: Array,
    value: Array,
    slopes: Slopes | None = None,
    *,
    backend: Backend = "auto",
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """Describes what `alibi_attention` would do with these arguments: which backend runs and why, and how far each head attends.

    Arguments and errors are those of `alibi_attention`, without `dropout_key`, which changes nothing here. It computes the
    attention, so arrays must not be traced.

    Raises:
        TypeError: an array is traced; call it outside of `jit`, `grad` and `vmap`.

    >>> import jax.numpy as jnp
    >>> q = k = v = jnp.ones((1, 128, 8, 64))
    >>> explain(q, k, v).call
    'B=1 H=8 K=8 T=128 S=128 D=64, float32 on cpu, causal'
    """
    spec = make_spec(query, key, value, slopes, **options)
    check_without_parts(spec, "explain in JAX")
    arrays = operands(spec, query, key, value, None)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        raise TypeError("explain reads values, but an array is traced; call it outside of jit, grad and vmap")
    plan = attention.make_plan(spec, query, backend)
    name = backend if backend != "auto" else "native" if plan.native else "dense" if plan.dense else "loop"
    platforms = attention.platforms(query)
    device = next(iter(platforms)) if len(platforms) == 1 else "several devices"
    first = np.asarray(arrays[1].offset, np.int64)
    farthest = first + spec.query_len if spec.causal else np.maximum(first + spec.query_len, spec.key_len - first)
    visited: tuple[tuple[NDArray[np.int64], ...], int] | None = None
    if plan.native or not plan.dense:
        _, _, of_xla, of_native = attention._forward(plan, *arrays)
        if of_native is not None:
            numbers: tuple[NDArray[np.int64], ...]
            keys = Visited.of(spec, first, np.asarray(of_native.visited))
            numbers = (*keys.reach_and_scores(spec), *keys.for_backward.reach_and_scores(spec))
        else:
            assert of_xla is not None
            assert of_xla.visited is not None
            assert of_xla.needed is not None
            numbers = (
                *_of_loop(spec, plan, first, of_xla.visited),
                *_of_loop(spec, plan, first, of_xla.needed),
            )
        visited = numbers, _visible(spec, first)
    return explanation(
        spec,
        arrays[0].query.dtype,
        device,
        name,
        _verdicts(name, platforms, backend),
        np.broadcast_to(np.clip(farthest, 0, spec.window)[:, None], (spec.batch, spec.num_heads)),
        np.asarray(spec.slopes),
        visited,
    )


def _verdicts(name: str, platforms: set[str], backend: Backend) -> dict[str, str]:
    reasons = {"native": native.why_not(platforms), "loop": None, "dense": None}
    otherwise = "can run; auto does not pick it on this device"
    return {other: verdict_on(other, name, backend, reason, otherwise) for other, reason in reasons.items()}


def _of_loop(
    spec: Spec, plan: Plan, first: NDArray[np.int64], visited: VisitedTiles
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(reach, scores), each [B, H], of the tiles that blocks of queries visited."""
    of_blocks = spec.batch, spec.num_heads, -1
    low, high = (np.asarray(x, np.int64).reshape(of_blocks) for x in visited[:2])
    intervals = [(low, high + 1)]
    intervals += [(x, x + 1) for x in (np.asarray(x, np.int64).reshape(of_blocks) for x in visited.outliers)]
    row = np.minimum(np.arange(low.shape[-1]) * plan.query_block, spec.query_len - plan.query_block)
    position = first[:, None, None] + row
    reach = scores = np.zeros(low.shape, np.int64)
    for begin, end in intervals:
        read = (begin >= 0) & (begin < end)
        key, last = begin * plan.key_tile, np.minimum(end * plan.key_tile, spec.key_len) - 1
        away = position + plan.query_block - key
        away = away if spec.causal else np.maximum(away, last - position + 1)
        reach = np.maximum(reach, np.where(read, away, 0))
        scores = scores + np.where(read, (last - key + 1) * plan.query_block, 0)
    return reach.max(-1), scores.sum(-1)


def _visible(spec: Spec, first: NDArray[np.int64]) -> int:
    """The number of query-key pairs that the masks allow, over all heads (ignoring keys that single heads hide)."""
    of_query, of_key = (None if x is None else np.asarray(x) for x in (spec.query_segments, spec.key_segments))
    count = 0
    for row in range(0, spec.query_len, ROWS):
        i = first[:, None] + np.arange(row, min(row + ROWS, spec.query_len))
        distance = i[:, :, None] - np.arange(spec.key_len)
        seen = distance >= 0 if spec.causal else np.ones(distance.shape, bool)
        if spec.window is not None:
            seen &= np.abs(distance) < spec.window
        if spec.key_mask is not None:
            seen &= np.asarray(spec.key_mask)[:, None]
        if of_query is not None and of_key is not None:
            seen &= of_query[:, row : row + ROWS, None] == of_key[:, None]
        count += int(seen.sum())
    return count * spec.num_heads
