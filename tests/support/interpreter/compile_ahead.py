"""Fills Triton's cache with what `alibi bench gpu` and `alibi bench gpu-models` launch, on all cores, before they run.

    python tests/support/interpreter/compile_ahead.py [SECONDS]

Every process makes all calls on an absent device (`alibi_lab/measure/absent_device.py`), which takes seconds, and compiles its
share of the kernels: the first process the first kernel, the second the second, and so on. After SECONDS it stops; kernels that
are not compiled by then are compiled when they are launched.
"""

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from alibi_attn import ALiBiAttention, alibi_attention, forgetting_attention
from alibi_attn.inspect import Norms, decode_with_norms
from alibi_attn.nn import ReachCache, StaticKVCache
from alibi_lab.measure.absent_device import absent_device
from alibi_lab.measure.gpu import SHAPES
from alibi_lab.measure.gpu_checks import CHECKED, arguments_of, end_at_once
from alibi_lab.measure.gpu_decoding import DECODING, ROOM, Given
from alibi_lab.measure.gpu_encoders import DOCUMENT, ENCODER, MIXED
from alibi_lab.measure.gpu_kernels import OF_KERNELS
from alibi_lab.measure.gpu_networks import BLOOM_STEP
from alibi_lab.measure.gpu_parts import Case
from alibi_lab.measure.gpu_rows import TOKENS
from alibi_lab.measure.gpu_steps import GATED, PLAIN, WITH_MASK, padding
from alibi_lab.measure.harness import training_step
from alibi_lab.measure.inputs import published_slopes

LENGTHS = (2048, 8192, 16384, 512, 131072, 65536)
CPU = torch.device("cpu")
Step = Callable[[], object]
Compile = Callable[..., object]


def steps() -> Iterator[Step]:
    """The calls of the benchmarks with uninitialized inputs of the same shapes, the most important first."""
    of_lengths = [Case(max(1, TOKENS // n), n, *shape) for n in LENGTHS for shape in SHAPES]
    plain = [*PLAIN.cases["full"], *OF_KERNELS.cases["full"], *of_lengths]
    yield from (_training(alibi_attention, case) for case in plain)
    for case in GATED.cases["full"]:
        gates = functional.logsigmoid(torch.randn(case.batch, case.heads, case.length))
        yield _training(forgetting_attention, case, gates)
    for case in WITH_MASK.cases["full"]:
        yield _training(functools.partial(alibi_attention, causal=False, key_mask=padding(case, CPU)), case)
    for case in ENCODER.cases["full"]:
        packed = Case(1, case.batch * case.length * 2 // 3 + 1, case.heads, case.head_dim) if case.batch > 1 else case
        segments = torch.arange(packed.length)[None] // 400 if case.batch > 1 else None
        yield _training(functools.partial(alibi_attention, causal=False, segment_ids=segments), packed)
    for case in MIXED.cases["full"]:
        shown = padding(case, CPU)
        segments = shown.nonzero()[None, :, 0]
        for dtype in (torch.bfloat16, torch.float16):
            yield functools.partial(
                _encoded, case._replace(batch=1, length=segments.shape[1]), dtype, segment_ids=segments
            )
        yield functools.partial(_encoded, case, torch.bfloat16, key_mask=shown)
        yield functools.partial(_encoded, case._replace(batch=1, length=case.length - 1), torch.bfloat16)
    for case in (*MIXED.cases["full"], *DOCUMENT.cases["full"]):
        yield functools.partial(_encoded, case, torch.bfloat16)
    yield functools.partial(_encoded, DOCUMENT.cases["full"][-1], torch.float32)
    for case in BLOOM_STEP.cases["full"]:
        yield functools.partial(_encoded, case, torch.bfloat16, causal=True)
    for case in DECODING.cases["full"]:
        yield functools.partial(_static, case)
    for case in of_lengths:
        yield functools.partial(_decoded, case)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for options in CHECKED:
            yield functools.partial(_checked, dtype, options)


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
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(shares, mp_context=context)
    futures = [executor.submit(compiled, share, shares, capability) for share in range(shares)]
    done, _ = concurrent.futures.wait(futures, timeout=seconds)
    names = [name for future in done for name in future.result()]
    took = time.monotonic() - start
    print(
        f"{len(done)} of {shares} processes have compiled their share in {took:.0f} s: {len(names)} kernels", flush=True
    )
    end_at_once(executor)
    return 0


def _empty(case: Case, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(case.batch, case.heads, tokens, case.head_dim, dtype=dtype)


def _training(attention: Callable[..., Tensor], case: Case, *more: Tensor) -> Step:
    def step() -> None:
        *inputs, grad = (_empty(case, case.length) for _ in range(4))
        training_step(functools.partial(attention, backend="fused"), [*inputs, *more], grad)()

    return step


def _encoded(case: Case, dtype: torch.dtype, *, causal: bool = False, **options: Tensor) -> None:
    """The attention of a layer without gradients, whose queries, keys and values are columns of one matrix."""
    joined = torch.empty(case.batch, case.length, 3 * case.heads * case.head_dim, dtype=dtype)
    inputs = (x.unflatten(-1, (case.heads, -1)).transpose(1, 2) for x in joined.chunk(3, dim=-1))
    with torch.no_grad():
        alibi_attention(*inputs, causal=causal, backend="fused", **options)  # type: ignore[misc]


def _decoded(case: Case) -> None:
    """One query after the keys of a cache, with and without their norms."""
    query, key, value = (_empty(case, tokens) for tokens in (1, case.length, case.length))
    slopes, norms = (
        published_slopes(case.heads),
        (torch.ones(case.batch, case.heads, -(-case.length // 64)).double(),) * 2,
    )
    with torch.no_grad():
        decode_with_norms(query, key, value, slopes, Norms(*norms), backend="fused")
        alibi_attention(query, key, value, slopes, backend="fused")


def _static(case: Case) -> None:
    """One query with each static cache, and a prompt."""
    layer = ALiBiAttention(case.heads * case.head_dim, case.heads).eval()
    layer.out_proj = nn.Identity()  # type: ignore[assignment]
    reach = layer.reach_cache(score_bound=15.0, tolerance=2.0**-12)
    assert isinstance(reach, ReachCache)
    caches = StaticKVCache(case.length + ROOM), reach.static(case.length + ROOM)
    with torch.no_grad():
        for tokens in (1, min(case.length - 1, 2047)):
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer, name, Given(_empty(case, tokens)))
            for cache in caches[: 2 if tokens == 1 else 1]:
                layer(torch.empty(1, tokens, layer.embed_dim, dtype=torch.bfloat16), cache=cache)


def _checked(dtype: torch.dtype, options: dict[str, object]) -> None:
    inputs, grad, named = arguments_of(dtype, options, CPU, 777)
    slopes = published_slopes(4)
    training_step(functools.partial(alibi_attention, backend="fused", **named), [*inputs, slopes], grad)()


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "a process that interprets cannot compile"
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))
