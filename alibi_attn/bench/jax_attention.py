"""`alibi bench jax`: causal ALiBi attention in JAX on this machine, ours against what users would pick instead."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from alibi_attn import records
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.columns import Columns
from alibi_attn.bench.timing import medians_ms
from alibi_attn.jax.attention import alibi_attention
from alibi_attn.slopes import alibi_slopes

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CHECKED_QUERIES = 64  # the last queries are held against fp64
NUM_HEADS, HEAD_DIM = 8, 64

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute it, up to the longest input that memory and patience allow; `exact` = it is ALiBi, and checked."""

    name: str
    run: Attention
    longest: int
    exact: bool = True


def peers() -> list[Peer]:
    """Ours, ours without the certificate, and JAX's own attention with a dense bias and without any."""
    return [
        Peer("ours", _ours, 65536),
        Peer("ours, tolerance 0", _ours_everything, 16384),
        Peer("dense bias", _dense, 8192),
        Peer("causal, no bias", _causal, 8192, exact=False),
    ]


def jax_attention(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = ("noise",),
    repeats: int = 5,
    budget_s: float = 20.0,
    memory: bool = True,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measure and keep one record for every kind of input; returns their paths.

    `forward_ms` is the time of the forward pass alone, `backward_ms` what a forward and backward pass, compiled as one,
    takes longer.

    Args:
        lengths: in tokens, n = T = S; 8 heads × 64, fp32, batch 1.
        kinds: of input: "noise" is standard normal, "peaked" has queries three times as long, "sink" a first key ten times
            as long.
        repeats, budget_s: turns at most, and seconds at most that the turns of one length and direction may take.
        memory: also measure peak memory, each in a process of its own.
    """
    device = jax.devices()[0]
    configs: dict[str, dict[str, records.Json]] = {
        kind: {
            "kind": kind, "heads": NUM_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "lengths": list(lengths),
            "framework": "jax", "device": device.device_kind,
        }
        for kind in kinds
    }  # fmt: skip
    on_cpu = device.platform == "cpu"
    return records_by_kind(
        out, f"jax/{device.platform}", configs, lengths=lengths, summary=_summary, say=say,
        train_step=_train_step if memory and on_cpu else None,
        measure=lambda kind, n: _measure(kind, n, repeats=repeats, budget_s=budget_s, say=say),
    )  # fmt: skip


def _measure(
    kind: str, length: int, *, repeats: int, budget_s: float, say: Callable[[str], None]
) -> dict[str, dict[str, records.Json]]:
    arrays, grad = _draw(kind, length)
    running = [peer for peer in peers() if peer.longest >= length]
    forward_calls: dict[str, Callable[[], object]] = {}
    step_calls: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, records.Json]] = {}
    true = _truth(*(np.asarray(x) for x in arrays))
    for peer in running:
        forward, step = jax.jit(peer.run), jax.jit(_step(peer.run))
        error = _relative_error(forward(*arrays), arrays[2], true)
        if peer.exact and not error < 1e-4:
            raise RuntimeError(f"{peer.name} is wrong at {length}: error {error:.1e} of max‖v‖")
        rows[peer.name] = {"length": length, "relative_error": error if peer.exact else None}
        forward_calls[peer.name] = partial(_finished, forward, *arrays)
        step_calls[peer.name] = partial(_finished, step, *arrays, grad)
    forward_ms = medians_ms(forward_calls, repeats=repeats, budget_s=budget_s)
    step_ms = medians_ms(step_calls, repeats=repeats, budget_s=budget_s)
    for name, row in rows.items():
        row["forward_ms"] = forward_ms[name]
        row["backward_ms"] = max(step_ms[name] - forward_ms[name], 0.0)
    said = [f"{n} {step_ms[n]:.0f} ms ({step_ms[n] / step_ms['ours']:.2f}×)" for n in rows]
    say(f"jax {kind} {length}, forward + backward: " + ", ".join(said))
    return rows


def _finished(function: Callable[..., object], *arrays: jax.Array) -> None:
    """JAX computes behind one's back: a call has ended when all its results are there."""
    for leaf in jax.tree.leaves(function(*arrays)):
        leaf.block_until_ready()


def _ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output = alibi_attention(query, key, value)
    assert isinstance(output, jax.Array)
    return output


def _ours_everything(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output = alibi_attention(query, key, value, tolerance=0.0)
    assert isinstance(output, jax.Array)
    return output


def _dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    slopes = jnp.asarray(alibi_slopes(NUM_HEADS), jnp.float32)[:, None, None]
    bias = jnp.where(distance >= 0, -slopes * distance, -jnp.inf)
    return jax.nn.dot_product_attention(query, key, value, bias=bias[None])


def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def _step(run: Attention) -> Callable[..., object]:
    def step(query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array) -> object:
        output, pull = jax.vjp(run, query, key, value)
        return output, pull(grad)

    return step


def _draw(kind: str, length: int) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    shape = (1, length, NUM_HEADS, HEAD_DIM)
    query, key, value, grad = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    if kind == "peaked":
        query *= 3
    elif kind == "sink":
        key[:, 0] *= 10
    elif kind != "noise":
        raise ValueError(f"kind is {kind!r} but must be 'noise', 'peaked' or 'sink'")
    return (jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)), jnp.asarray(grad)


def _truth(query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32]) -> NDArray[np.float64]:
    """[checked, H, D] in fp64: the last queries."""
    n = query.shape[1]
    q, k, v = (x[0].astype(np.float64) for x in (query[:, -CHECKED_QUERIES:], key, value))
    i = np.arange(n)[-CHECKED_QUERIES:]
    distance = i[:, None] - np.arange(n)
    scores = np.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5 - alibi_slopes(NUM_HEADS)[:, None, None] * distance
    scores = np.where(distance >= 0, scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    true: NDArray[np.float64] = np.einsum("hts,shd->thd", weight / weight.sum(-1, keepdims=True), v)
    return true


def _relative_error(output: jax.Array, value: jax.Array, true: NDArray[np.float64]) -> float:
    got = np.asarray(output)[0, -CHECKED_QUERIES:].astype(np.float64)
    return float(np.linalg.norm(got - true, axis=-1).max() / np.linalg.norm(np.asarray(value), axis=-1).max())


def _train_step(kind: str, length: int) -> None:
    arrays, grad = _draw(kind, length)
    _finished(jax.jit(_step(_ours)), *arrays, grad)


def _summary(columns: Columns) -> dict[str, float | None]:
    """How many times longer than ours every peer takes, forward + backward, at the longest input that both did."""
    summary: dict[str, float | None] = {}
    ours = columns["ours"]
    total = {n: f + b for n, f, b in zip(ours["length"], ours["forward_ms"], ours["backward_ms"], strict=True)}  # type: ignore[operator]
    for name, column in columns.items():
        if name == "ours" or "forward_ms" not in column:
            continue
        n, f, b = column["length"][-1], column["forward_ms"][-1], column["backward_ms"][-1]
        summary[f"{name} over ours at {n}"] = (f + b) / total[n]  # type: ignore[operator]
    return summary
