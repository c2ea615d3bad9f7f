"""`explain` for JAX arrays: which backend runs a call and why, how far each head attends, and the certified bound."""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.attention.call.explanation import Explanation, explanation, verdict_on
from alibi_attn.attention.call.options import AttentionOptions
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.jax import attention
from alibi_attn.jax.attention import Backend
from alibi_attn.jax.backends import xla
from alibi_attn.jax.call import merging
from alibi_attn.jax.call.operands import operands
from alibi_attn.jax.call.plan import Array, Plan
from alibi_attn.jax.call.plan import Visited as VisitedTiles
from alibi_attn.jax.call.validation import Slopes, make_spec

Spec = AttentionSpec[Array]
ROWS = 256  # queries whose pairs are counted at a time


def explain(
    query: Array,
    key: Array,
    value: Array,
    slopes: Slopes | None = None,
    *,
    backend: Backend = "auto",
    **options: Unpack[AttentionOptions[Array]],
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
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((query, key, value, list(vars(spec).values())))):
        raise TypeError("explain reads values, but an array is traced; call it outside of jit, grad and vmap")
    plan = attention.make_plan(spec, query, backend)
    name = backend if backend != "auto" else "native" if plan.native else "dense" if plan.dense else "loop"
    platforms = attention.platforms(query)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    visited = _visited(merging.Part(spec, query, key, value), backend)
    return explanation(
        spec,
        query.dtype,
        next(iter(platforms)) if len(platforms) == 1 else "several devices",
        name,
        _verdicts(name, platforms, backend, {name: attention.why_not(name, spec, query) for name in attention.READS}),
        _farthest(spec),
        np.asarray(spec.slopes),
        None if visited is None else (visited, _visible(spec)),
    )


def _visited(part: merging.Part, backend: Backend) -> tuple[NDArray[np.int64], ...] | None:
    """(reach, scores) [B, H] of a call, added up over its parts, or (…, …, both for backward) without parts; None = all keys.

    The loop reads fewer keys if no gradient is needed: forward's numbers are for such a call.
    """
    spec = part.spec
    if attention.splits(spec, backend):
        return _of_parts(spec, merging.parts(part.as_a_whole()), backend)
    plan = attention.make_plan(spec, part.query, backend)
    if plan.fused is not None or (plan.dense and not plan.native):
        return None
    arrays, rest = operands(spec, part.query, part.key, part.value, None)
    rest = rest._replace(key_bias_low=part.key_bias_low, query_bias_low=part.query_bias_low)
    of_xla, of_native = attention._forward(plan, arrays, rest)[3:]
    first = _first(spec)
    if of_native is not None:
        keys = Visited.of(spec, first, np.asarray(of_native.visited))
        return *keys.reach_and_scores(spec), *keys.for_backward.reach_and_scores(spec)
    assert isinstance(of_xla, xla.Saved)
    assert of_xla.visited is not None
    trained = attention._forward(dataclasses.replace(plan, for_gradients=True), arrays, rest)[3]
    assert isinstance(trained, xla.Saved)
    assert trained.needed is not None
    return *_of_loop(spec, plan, first, of_xla.visited), *_of_loop(spec, plan, first, trained.needed)


def _of_parts(spec: Spec, parts: list[merging.Part], backend: Backend) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    reach, scores = np.zeros((2, spec.batch, spec.num_heads), np.int64)
    for part in parts:
        pairs = part.spec.query_len * part.spec.key_len
        of_part, count, *_ = _visited(part, backend) or (_farthest(part.spec), np.int64(pairs))
        if part.places is not None:  # counted in the part, where queries and keys have other indices
            of_part = _farthest(spec)
        heads = slice(None) if part.heads is None else list(part.heads)
        reach[:, heads] = np.maximum(reach[:, heads], of_part + (of_part > 0) * part.is_reversed)
        scores[:, heads] += count
    return reach, scores


def _first(spec: Spec) -> NDArray[np.int64]:
    """[B]: the position of query 0."""
    return np.broadcast_to(np.asarray(spec.query_offset, np.int64), spec.batch)


def _farthest(spec: Spec) -> NDArray[np.int64]:
    """[B, H]: 1 + the largest |i − j| that causality and the windows allow."""
    first = _first(spec)
    most = first + spec.query_len
    if not spec.causal:
        most = np.maximum(most, spec.key_len - first)
    if spec.prefix_len is not None:
        most = np.maximum(most, np.asarray(spec.prefix_len) - first)
    windows = (spec.head_windows or (spec.window,) * spec.num_heads) if spec.sinks == 0 else (None,) * spec.num_heads
    return np.stack([np.clip(most, 0, window) for window in windows], 1)


def _verdicts(name: str, platforms: set[str], backend: Backend, reasons: dict[str, str | None]) -> dict[str, str]:
    otherwise = dict.fromkeys(reasons, "can run; auto does not pick it on this device")
    if platforms == {"gpu"}:
        most = attention.GPU_DENSE_SCORES
        otherwise |= {
            "dense": f"can run; auto picks it on a GPU for at most {most:,} scores",
            "loop": f"can run; auto picks it on a GPU for more than {most:,} scores",
        }
    return {other: verdict_on(other, name, backend, reason, otherwise[other]) for other, reason in reasons.items()}


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


def _visible(spec: Spec) -> int:
    """The number of query-key pairs that the masks allow, over all heads (ignoring keys that single heads hide)."""
    of_query, of_key, prefix_len = (
        None if x is None else np.asarray(x) for x in (spec.query_segments, spec.key_segments, spec.prefix_len)
    )
    first, keys, windows, count = _first(spec), np.arange(spec.key_len), spec.head_windows or (spec.window,), 0
    for row in range(0, spec.query_len, ROWS):
        i = first[:, None] + np.arange(row, min(row + ROWS, spec.query_len))
        distance = i[:, :, None] - keys
        seen = distance >= 0 if spec.causal else np.ones(distance.shape, bool)
        if prefix_len is not None:
            seen |= (keys < prefix_len[:, None])[:, None]
        if spec.key_mask is not None:
            seen &= np.asarray(spec.key_mask)[:, None]
        if of_query is not None and of_key is not None:
            seen &= of_query[:, row : row + ROWS, None] == of_key[:, None]
        for window in windows:
            near = seen if window is None else seen & ((np.abs(distance) < window) | (keys < spec.sinks))
            count += int(near.sum())
    return count * (spec.num_heads // len(windows))
