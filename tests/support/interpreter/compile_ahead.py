"""Fills Triton's cache with what `make gpu` measures, on all cores, before they run.

    python tests/support/interpreter/compile_ahead.py [SECONDS]

Every process makes all calls on an absent device (`alibi_lab/measure/absent_device.py`), which takes seconds, and compiles its
share of the kernels: the first process the first kernel, the second the second, and so on. After SECONDS it stops; kernels that
are not compiled by then are compiled when they are launched.
"""

import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from alibi_attn import alibi_attention
from alibi_lab.measure.absent_device import absent_device
from alibi_lab.measure.decoding import static_cache, static_reach
from alibi_lab.measure.harness import prepared
from alibi_lab.measure.inputs import BATCH_TOKENS, Case, draw
from alibi_lab.measure.peers import Peer
from alibi_lab.measure.peers.ours import ours, ours_with_cache

LENGTHS = (2048, 16384, 131072, 512, 8192, 65536)
Step = Callable[[], object]
Compile = Callable[..., object]


def steps() -> Iterator[Step]:
    """Our calls of the benchmarks' cases on inputs of the same shapes, the most important first."""
    shapes = [(kind, length, 16, 128) for kind, length in itertools.product(("noise",), LENGTHS[:3])]
    shapes += [("gates-4-U-8", 8192, 16, 128), *(("masked", length, 12, 64) for length in (512, 2048, 8192))]
    shapes += [("noise", length, 32, 64) for length in LENGTHS]
    for kind, length, heads, head_dim in shapes:
        case = Case(kind, length, max(1, BATCH_TOKENS // length), heads, head_dim, dtype=torch.bfloat16)
        peer = Peer("ours", ours("fused"), gated=True)
        yield functools.partial(_measured, peer, case, backward=True)
    for length in LENGTHS[:3]:
        case = Case("noise", length, max(1, BATCH_TOKENS // length), 16, 128, queries=1, dtype=torch.bfloat16)
        for prepare in (ours_with_cache("fused"), ours("fused"), static_cache, static_reach):
            yield functools.partial(_measured, Peer("ours", prepare), case, backward=False)
    for length in (512, 8192):
        for segments in (None, torch.arange(length)[None] // 400):
            yield functools.partial(_encoded, length, segments)


def compiled(
    share: int,
    shares: int,
    capability: tuple[int, int] = (9, 0),
    *,
    most: int | None = None,
    own: Compile | None = None,
) -> list[str]:
    """Makes the calls and compiles each kernel number `share` of `shares`; returns their names.

    Args:
        most: the largest number of calls to make; None = all.
        own: what compiles, in place of Triton's compiler.
    """
    from triton import compiler

    compile_it, names = own or compiler.compile, list[str]()
    with absent_device(capability=capability):
        count, absent = itertools.count(), compiler.compile

        def chosen(source: object, **options: object) -> object:
            if next(count) % shares != share:
                return absent(source, **options)
            names.append(source.fn.__name__)  # type: ignore[attr-defined]
            return compile_it(source, **options)

        with mock.patch.object(compiler, "compile", chosen):
            for step in itertools.islice(steps(), most):
                step()
    return names


def main(seconds: float) -> int:
    start, shares = time.monotonic(), os.cpu_count() or 1
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the processes: whatever they do stays off the device
    with multiprocessing.get_context("spawn").Pool(shares) as pool:  # its end ends what still runs
        results = [pool.apply_async(compiled, (share, shares, capability)) for share in range(shares)]
        for result in results:
            result.wait(max(start + seconds - time.monotonic(), 0.0))
        done = [result.get() for result in results if result.ready()]
    took, kernels = time.monotonic() - start, sum(map(len, done))
    print(f"{len(done)} of {shares} processes have compiled their share in {took:.0f} s: {kernels} kernels", flush=True)
    return 0


def _measured(peer: Peer, case: Case, *, backward: bool) -> None:
    call = prepared(peer, draw(case), backward=backward)
    call.forward()
    if call.step is not None:
        call.step()


def _encoded(length: int, segments: Tensor | None) -> None:
    """The attention of an encoder's layer, whose queries, keys and values are columns of one matrix."""
    joined = torch.empty(1, length, 3 * 12 * 64, dtype=torch.bfloat16)
    inputs = (x.unflatten(-1, (12, 64)).transpose(1, 2) for x in joined.chunk(3, dim=-1))
    with torch.no_grad():
        alibi_attention(*inputs, causal=False, segment_ids=segments, backend="fused")


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))
