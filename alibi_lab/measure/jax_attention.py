"""`alibi bench jax`: our JAX attention compared with jax.nn.dot_product_attention, with a dense bias, without a bias,
and with our PyTorch call.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from alibi_attn.jax import alibi_attention
from alibi_lab.measure import harness
from alibi_lab.measure.correctness import Reference
from alibi_lab.measure.harness import Candidate, Columns, Row, Say, number
from alibi_lab.measure.inputs import Case, draw, published_slopes
from alibi_lab.measure.peers import Peer, dot_product_attention
from alibi_lab.measure.peers.ours import ours as ours_in_torch

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CHECKED_QUERIES = 64  # the last queries are compared with fp64
TORCH = "PyTorch"
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value and the gradient of the output
Calls = tuple[Callable[[], object], Callable[[], object]]  # forward, and forward and backward


def ours(**options: Any) -> Callable[..., Callable[..., jax.Array]]:
    """Our JAX attention with these options, as a peer's `prepare`."""
    attention = dot_product_attention.bound(functools.partial(alibi_attention, **options))
    return lambda query, key, value, slopes: attention


PEERS = (
    Peer("ours", ours(), "alibi_attention", longest=65536),
    Peer(TORCH, ours_in_torch("auto"), "alibi_attn.alibi_attention of tensors [B, H, T, D]", longest=65536),
    Peer("ours, the loop", ours(backend="loop"), 'alibi_attention(backend="loop")', longest=8192),
    Peer("ours, tolerance 0", ours(tolerance=0.0), "alibi_attention without a certificate", longest=16384),
    dot_product_attention.DENSE,
    dot_product_attention.CAUSAL,
)


def jax_attention(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = ("noise",),
    repeats: int = 5,
    seconds: float = 20.0,
    memory: bool = True,
    peers: Sequence[Peer] = PEERS,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per kind of input, and returns their paths.

    `forward_ms` is the time of the forward pass alone; `backward_ms` is the additional time of a forward and backward pass that
    are compiled together. Calls have 8 heads × 64, T = S, fp32, batch 1; `kinds` are kinds of input, see `inputs.draw`.

    Args:
        lengths: sequence lengths, as in 1024,8192; default 512 … 65536.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length and direction.
        memory: also measure peak memory at 8192, 16384, 32768 and 65536 tokens.
    """
    device = jax.devices()[0]
    config = harness.attention_config(peers, lengths, framework="jax", device=device.device_kind)
    configs = {kind: {**config, "kind": kind} for kind in kinds}
    name, train_step = f"jax/{device.platform}", _train_step if memory and device.platform == "cpu" else None

    def measure(kind: str, length: int) -> dict[str, Row]:
        case = Case(kind, length)
        inputs, slopes = draw(case), published_slopes(case.num_heads)
        reference = Reference.of(*inputs, slopes)
        candidates = {peer.name: _checked(peer, reference, inputs, slopes) for peer in peers}
        rows: dict[str, Row] = {}
        # Ours and PyTorch take turns first, then the others: materializing n² numbers slows down the next call.
        for close in (True, False):
            part = {name: each for name, each in candidates.items() if (name in ("ours", TORCH)) == close}
            rows |= harness.timed(part, repeats=repeats, seconds=seconds / 2)
        for row in rows.values():
            if row["backward_ms"] is not None:
                row["backward_ms"] = max(number(row["backward_ms"]) - number(row["forward_ms"]), 0.0)
        return {name: rows[name] for name in candidates}

    return harness.keep_by_length(
        out, name, configs, lengths=lengths, measure=measure, train_step=train_step, summary=_summary, say=say
    )


def _checked(peer: Peer, reference: Reference, inputs: Inputs, slopes: Tensor) -> Candidate:
    """Checks a peer. Its `Candidate.backward` is forward and backward, compiled together.

    Raises:
        RuntimeError: the peer is wrong.
    """
    length = inputs[1].shape[2]
    row: Row = {"length": length, "relative_error": None, "why_not": None}
    if length > peer.longest:
        return Candidate({**row, "why_not": f"not tried beyond {peer.longest} tokens"})
    calls = _torch_calls if peer.name == TORCH else _jax_calls
    of_forward, of_step = calls(peer, inputs, slopes)
    output = of_forward()
    if not isinstance(output, Tensor):
        output = torch.from_numpy(np.array(output)).transpose(1, 2)
    errors = reference.compare(peer, [output[:, :, -CHECKED_QUERIES:]])
    if errors.wrong is not None:
        raise RuntimeError(f"at {length} tokens {errors.wrong}")
    return Candidate({**row, "relative_error": errors.output}, of_forward, of_step)


def _torch_calls(peer: Peer, inputs: Inputs, slopes: Tensor) -> Calls:
    *qkv, grad = inputs
    attention = peer.prepare(*qkv, slopes)
    return harness.forward_pass(attention, qkv), harness.training_step(attention, qkv, grad)


def _jax_calls(peer: Peer, inputs: Inputs, slopes: Tensor) -> Calls:
    """(forward, step) as jitted calls that wait for their results, because JAX dispatches asynchronously."""
    *qkv, grad = (_in_jax(x) for x in inputs)
    attention = peer.prepare(*qkv, jnp.asarray(slopes.numpy()))
    of_forward = functools.partial(_finished, jax.jit(forward), attention, *qkv)
    return of_forward, functools.partial(_finished, jax.jit(step), attention, grad, *qkv)


def _in_jax(x: Tensor) -> jax.Array:
    """[B, H, n, D] -> [B, n, H, D], JAX's layout."""
    return jnp.asarray(x.transpose(1, 2).contiguous().numpy())


def _finished(function: Callable[..., object], *arguments: object) -> object:
    return jax.block_until_ready(function(*arguments))  # type: ignore[no-untyped-call]


def forward(attention: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attention(query, key, value)


def step(
    attention: Callable[..., jax.Array], grad: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> object:
    output, pull = jax.vjp(attention, query, key, value)
    return output, pull(grad)


def _train_step(kind: str, length: int) -> None:
    query, key, value, grad = (_in_jax(x) for x in draw(Case(kind, length)))
    _finished(jax.jit(step), dot_product_attention.bound(alibi_attention), grad, query, key, value)


def _summary(columns: Columns) -> dict[str, float | None]:
    """By peer: its time over ours, forward + backward, at its longest timed input."""
    whole = {name: harness.whole_times(column) for name, column in columns.items()}
    ours = whole.pop("ours", {})
    return {
        f"{name} over ours at {max(times)}": times[max(times)] / ours[max(times)]
        for name, times in whole.items()
        if times and ours
    }
