"""`alibi bench jax`: causal ALiBi attention in JAX on this machine, against what users would pick instead and PyTorch's call."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from alibi_attn import records
from alibi_attn.attention import api
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.columns import Columns
from alibi_attn.bench.timing import medians_ms
from alibi_attn.jax.attention import alibi_attention
from alibi_attn.slopes import alibi_slopes

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CHECKED_QUERIES = 64  # the last queries are held against fp64
LARGEST_ERROR = (
    1e-5  # of max‖v‖: rounding in fp32 is a fiftieth of that, and a slope off by one head a thousand times more
)
NUM_HEADS, HEAD_DIM = 8, 64

Attention = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute it.

    Args:
        run: (query, key, value, *made) -> output.
        longest: the longest input that memory and patience allow.
        note: how it is written.
        make: length -> what its users make once, outside of what is timed.
        biased: it computes ALiBi; if not, it is held against attention without a bias.
        of_torch: it runs in PyTorch, with `run` over tensors [B, H, T, D].
    """

    name: str
    run: Attention
    longest: int
    note: str
    make: Callable[[int], tuple[jax.Array, ...]] = lambda length: ()
    biased: bool = True
    of_torch: bool = False


def peers() -> list[Peer]:
    """Ours, the same in PyTorch, ours in other ways, and JAX's own attention with a dense bias and without any."""
    return [
        Peer("ours", _ours, 65536, "alibi_attention"),
        Peer("PyTorch", _of_torch, 65536, "alibi_attn.alibi_attention of tensors [B, H, T, D]", of_torch=True),
        Peer("ours, the loop", _our_loop, 8192, 'alibi_attention(backend="loop")'),
        Peer("ours, tolerance 0", _ours_everything, 16384, "alibi_attention without a certificate"),
        Peer("dense bias", _dense, 8192, "dot_product_attention with a bias that is built once", make=_bias),
        Peer("causal, no bias", _causal, 8192, "dot_product_attention is_causal=True; no ALiBi at all", biased=False),
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
            "framework": "jax", "device": device.device_kind, "peers": {peer.name: peer.note for peer in peers()},
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
    forward_calls: dict[str, Callable[[], object]] = {}
    step_calls: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, records.Json]] = {}
    true = {biased: _truth(*(np.asarray(x) for x in arrays), biased=biased) for biased in (True, False)}
    for peer in peers():
        rows[peer.name] = {
            "length": length,
            "relative_error": None,
            "forward_ms": None,
            "backward_ms": None,
            "why_not": None,
        }
        if length > peer.longest:
            rows[peer.name]["why_not"] = f"not tried beyond {peer.longest} tokens"
            continue
        forward, step = (_torch_calls if peer.of_torch else _jax_calls)(peer, arrays, grad)
        error = _relative_error(forward(), arrays[2], true[peer.biased])
        if not error < LARGEST_ERROR:
            raise RuntimeError(f"{peer.name} is wrong at {length}: error {error:.1e} of max‖v‖")
        rows[peer.name]["relative_error"] = error
        forward_calls[peer.name], step_calls[peer.name] = forward, step
    forward_ms, step_ms = (
        _in_two_rounds(calls, repeats=repeats, budget_s=budget_s) for calls in (forward_calls, step_calls)
    )
    for name in forward_ms:
        rows[name]["forward_ms"] = forward_ms[name]
        rows[name]["backward_ms"] = max(step_ms[name] - forward_ms[name], 0.0)
    said = [f"{n} {step_ms[n]:.0f} ms ({step_ms[n] / step_ms['ours']:.2f}×)" for n in step_ms]
    say(f"jax {kind} {length}, forward + backward: " + ", ".join(said))
    return rows


def _in_two_rounds(calls: dict[str, Callable[[], object]], *, repeats: int, budget_s: float) -> dict[str, float]:
    """Ours and PyTorch take turns by themselves, then the others: one that writes out n² numbers makes the next one slower."""
    close = {name: call for name, call in calls.items() if name in ("ours", "PyTorch")}
    others = {name: call for name, call in calls.items() if name not in close}
    return {
        name: ms
        for part in (close, others)
        if part
        for name, ms in medians_ms(part, repeats=repeats, budget_s=budget_s / 2).items()
    }


def _jax_calls(
    peer: Peer, arrays: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[Callable[[], Any], Callable[[], object]]:
    """(the forward pass, forward and backward as one), jitted; calls that return when all is there."""
    forward, step, made = jax.jit(peer.run), jax.jit(_step(peer.run)), peer.make(arrays[0].shape[1])
    return partial(_finished, forward, *arrays, *made), partial(_finished, step, grad, *arrays, *made)


def _torch_calls(
    peer: Peer, arrays: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[Callable[[], Any], Callable[[], object]]:
    """The same of PyTorch, in its own layout."""
    leaves = [torch.from_numpy(np.array(x)).transpose(1, 2).contiguous().requires_grad_() for x in arrays]
    of_output = torch.from_numpy(np.array(grad)).transpose(1, 2).contiguous()

    @torch.no_grad()
    def forward() -> Any:
        return peer.run(*leaves).transpose(1, 2).numpy()

    def step() -> object:
        return torch.autograd.grad(peer.run(*leaves), leaves, of_output)

    return forward, step


def _finished(function: Callable[..., object], *arrays: jax.Array) -> object:
    """JAX computes behind one's back: a call has ended when all its results are there."""
    return jax.block_until_ready(function(*arrays))  # type: ignore[no-untyped-call]


def _of_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output = api.alibi_attention(query, key, value)
    assert isinstance(output, torch.Tensor)
    return output


def _our_loop(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output = alibi_attention(query, key, value, backend="loop")
    assert isinstance(output, jax.Array)
    return output


def _ours(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output = alibi_attention(query, key, value)
    assert isinstance(output, jax.Array)
    return output


def _ours_everything(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    output = alibi_attention(query, key, value, tolerance=0.0)
    assert isinstance(output, jax.Array)
    return output


def _bias(length: int) -> tuple[jax.Array]:
    """[1, H, n, n]."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    slopes = jnp.asarray(alibi_slopes(NUM_HEADS), jnp.float32)[:, None, None]
    return (jnp.where(distance >= 0, -slopes * distance, -jnp.inf)[None],)


def _dense(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def _step(run: Attention) -> Callable[..., object]:
    def step(grad: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, *made: jax.Array) -> object:
        output, pull = jax.vjp(lambda q, k, v: run(q, k, v, *made), query, key, value)
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


def _truth(
    query: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32], *, biased: bool
) -> NDArray[np.float64]:
    """[checked, H, D] in fp64: the last queries."""
    n = query.shape[1]
    q, k, v = (x[0].astype(np.float64) for x in (query[:, -CHECKED_QUERIES:], key, value))
    i = np.arange(n)[-CHECKED_QUERIES:]
    distance = i[:, None] - np.arange(n)
    slopes = alibi_slopes(NUM_HEADS) * biased
    scores = np.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5 - slopes[:, None, None] * distance
    scores = np.where(distance >= 0, scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    true: NDArray[np.float64] = np.einsum("hts,shd->thd", weight / weight.sum(-1, keepdims=True), v)
    return true


def _relative_error(output: NDArray[np.float32], value: jax.Array, true: NDArray[np.float64]) -> float:
    got = np.asarray(output)[0, -CHECKED_QUERIES:].astype(np.float64)
    return float(np.linalg.norm(got - true, axis=-1).max() / np.linalg.norm(np.asarray(value), axis=-1).max())


def _train_step(kind: str, length: int) -> None:
    arrays, grad = _draw(kind, length)
    _finished(jax.jit(_step(_ours)), grad, *arrays)


def _summary(columns: Columns) -> dict[str, float | None]:
    """How many times longer than ours every peer takes, forward + backward, at the longest input that both did."""
    summary: dict[str, float | None] = {}
    ours = columns["ours"]
    total = {n: f + b for n, f, b in zip(ours["length"], ours["forward_ms"], ours["backward_ms"], strict=True)}  # type: ignore[operator]
    for name, column in columns.items():
        if name == "ours" or "forward_ms" not in column:
            continue
        timed = zip(column["length"], column["forward_ms"], column["backward_ms"], strict=True)
        for n, f, b in [row for row in timed if row[1] is not None][-1:]:
            summary[f"{name} over ours at {n}"] = (f + b) / total[n]  # type: ignore[operator]
    return summary
