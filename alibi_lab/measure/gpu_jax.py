"""The parts "jax" and "jax-triton" of `alibi bench gpu-models`: training steps in JAX, with our attention and with JAX's own.

XLA compiles the calls of a case in several threads before any is timed. Up to LONGEST_TRUTH tokens one head is compared with fp64
as in `gpu_truth.py`, beyond it the last queries as in `correctness.py`.
"""

import concurrent.futures
import functools
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alibi_lab.measure.correctness import ROWS, Reference
from alibi_lab.measure.gpu_parts import Calls, Case, Part, cases, drawn
from alibi_lab.measure.gpu_truth import Truth, with_slope
from alibi_lab.measure.harness import Row
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import Peer
from alibi_lab.measure.timing import FILL_MS, elapsed_ms, step_times

if TYPE_CHECKING:
    import jax

    Compiled = concurrent.futures.Future[tuple[Callable[..., Any], Callable[..., Any]]]

PATIENCE_S = 5.0  # a step that would take longer, judged by the case before, is left out
LONGEST_TRUTH = 16384
REPEATS = 5
OURS, FUSED, DENSE, CUDNN, BIASED = "ours", "ours, Triton", "ours, dense", "JAX, no bias, cuDNN", "JAX + dense bias"
NOTES = {
    OURS: "alibi_attention(backend='loop'), which 'auto' takes on CUDA for long input",
    FUSED: "alibi_attention(backend='fused')",
    DENSE: "alibi_attention(backend='dense')",
    CUDNN: "jax.nn.dot_product_attention(is_causal=True, implementation='cudnn'); no ALiBi at all",
    BIASED: "jax.nn.dot_product_attention with a bias that is built once, compiled by XLA",
}


def _peers() -> list[Peer]:
    from alibi_lab.measure import jax_attention
    from alibi_lab.measure.peers import dot_product_attention as theirs

    return [
        Peer(FUSED, jax_attention.ours(backend="fused"), NOTES[FUSED]),
        Peer(OURS, jax_attention.ours(backend="loop"), NOTES[OURS], longest=LONGEST_TRUTH),
        Peer(CUDNN, theirs.cudnn, NOTES[CUDNN], biased=False),
        Peer(BIASED, theirs.dense, NOTES[BIASED], longest=LONGEST_TRUTH),
        Peer(DENSE, jax_attention.ours(backend="dense"), NOTES[DENSE], longest=8192),
    ]


class Steps:
    """Checks and times the peers of one case after the other; remembers how long a step of each took."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._pace: dict[str, float] = {}  # seconds of a step by peer: per token for our calls, else per score

    def __call__(self, case: Case, device: torch.device) -> Calls:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch computes the truth on the same device
        import jax
        import jax.numpy as jnp

        peers = [peer for peer in _peers() if peer.name in self._names]
        *inputs, grad = drawn(case, device)
        slopes = published_slopes(case.heads, device)
        judge = _judge(case, inputs, grad, slopes, {peer.biased for peer in peers})
        # [B, H, T, D] -> [B, T, H, D], JAX's layout
        *arrays, pulled = (jnp.from_dlpack(x.transpose(1, 2).contiguous()) for x in (*inputs, grad))
        m = jnp.from_dlpack(slopes)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()

        def row(peer: Peer, compiled: "Compiled") -> Row:
            forward, step = compiled.result()
            attention = jax.block_until_ready(peer.prepare(*arrays, m))  # type: ignore[no-untyped-call]
            whole = functools.partial(step, attention, pulled, *arrays)
            output, gradients = jax.block_until_ready(whole())  # type: ignore[no-untyped-call]
            row = judge(peer, [torch.utils.dlpack.from_dlpack(x).transpose(1, 2) for x in (output, *gradients)])
            del output, gradients
            if row["right"]:
                forward_ms = _milliseconds(functools.partial(forward, attention, *arrays))
                whole_ms = _milliseconds(whole)
                row |= step_times(forward_ms, whole_ms, elapsed_ms(whole) * 1e3)
                self._pace[peer.name] = whole_ms / 1e3 / _work(peer, case)
            return row

        calls: Calls = {}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for peer in peers:
                if (why_not := self._why_not(peer, case)) is not None:
                    calls[peer.name] = functools.partial(dict, why_not=why_not)
                else:
                    compiled = pool.submit(_compiled, peer, arrays, pulled, m)
                    calls[peer.name] = functools.partial(row, peer, compiled)
        return calls

    def _why_not(self, peer: Peer, case: Case) -> str | None:
        if case.length > peer.longest:
            return f"not tried beyond {peer.longest} tokens"
        expected = self._pace.get(peer.name, 0.0) * _work(peer, case)
        return f"a step would take {expected:.0f} s" if expected > PATIENCE_S else None


def _work(peer: Peer, case: Case) -> int:
    tokens = case.batch * case.heads * case.length
    return tokens if peer.name in (OURS, FUSED) else tokens * case.length


def _judge(
    case: Case, inputs: Sequence[Tensor], grad: Tensor, slopes: Tensor, kinds: Collection[bool]
) -> Callable[[Peer, list[Tensor]], Row]:
    """What compares the output and gradients of a peer, each [B, H, T, D], with the truth. `kinds`: with or without a bias."""
    if case.length > LONGEST_TRUTH:
        query, key, value = inputs
        reference = Reference.of(query, key, value, grad, slopes)

        def of_last(peer: Peer, outputs: list[Tensor]) -> Row:
            errors = reference.compare(peer, [x[:1, :, -ROWS:] for x in outputs])
            return {"relative_error": errors.output, "right": errors.wrong is None, "why_not": errors.wrong}

        return of_last
    truths = {biased: Truth.of(with_slope(slopes * biased, case.length), inputs, grad) for biased in kinds}
    return lambda peer, outputs: truths[peer.biased].row(outputs)


def _compiled(
    peer: Peer, arrays: Sequence["jax.Array"], grad: "jax.Array", slopes: "jax.Array"
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward pass and the training step, for arrays of these shapes."""
    import jax

    from alibi_lab.measure.jax_attention import forward, step

    attention = jax.eval_shape(peer.prepare, *arrays, slopes)
    of_forward = jax.jit(forward).lower(attention, *arrays)
    return of_forward.compile(), jax.jit(step).lower(attention, grad, *arrays).compile()


def _milliseconds(call: Callable[[], object]) -> float:
    """The median of several warm calls, dispatched back to back; a call of half a second or more is timed once, cold."""
    import jax

    def elapsed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)  # type: ignore[no-untyped-call]
        return (time.perf_counter() - start) * 1e3 / calls

    cold = elapsed(1)
    if cold > 500 or jax.default_backend() == "cpu":
        return cold
    calls = max(1, min(50, int(FILL_MS / elapsed(1))))
    return statistics.median(elapsed(calls) for _ in range(REPEATS))


CASES = cases("1x2048x16x128 8x2048x16x128 1x16384x16x128 1x131072x16x128 2x8192x16x128", "2x70x2x16")
# Apart, because a kernel that fails on a device ends all that its process could still measure.
JAX, JAX_TRITON = (
    Part(part, seconds, {name: NOTES[name] for name in names}, CASES, Steps(*names))
    for part, seconds, names in (("jax", 30.0, (OURS, CUDNN, BIASED, DENSE)), ("jax-triton", 25.0, (FUSED,)))
)
