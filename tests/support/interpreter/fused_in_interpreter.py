"""Our Triton kernels on a CPU; runs in the one child process in which Triton interprets instead of compiling.

Triton decides at import, and a process that interprets can no longer compile, so the kernels get a separate process.
Uninitialized memory is NaN there, so that missing writes are detected.
"""

import atexit
import collections
import contextlib
import functools
import gc
import importlib.util
import os
import types
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import quick_interpreter
import torch
from attention_cases import Case
from attention_checks import answer, arguments
from certificate_attack import keys_in_tiles
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import split_keys
from alibi_attn.attention.backends.fused.configs import tile_shape
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms


@contextlib.contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """An executor with one process that interprets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare) as executor:
        # The child starts with this variable, before torch imports triton; this process imports triton without it.
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            executor.submit(int).result()
        finally:
            del os.environ["TRITON_INTERPRET"]
        yield executor


def run_test(path: str, name: str, arguments: dict[str, Any]) -> None:
    """Runs one test of a file, which the process loads once."""
    torch.manual_seed(0)
    getattr(_loaded(path), name)(**arguments)


@functools.cache
def _loaded(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_answer(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Output, lse and gradients of one case, by name."""
    quick_interpreter.check_overflow(on=dtype == "float32")
    got = answer(case, getattr(torch, dtype), backend="fused")
    quick_interpreter.check_overflow(on=False)
    return {name: x.numpy() for name, x in ({"output": got.output, "lse": got.lse} | got.gradients).items()}


def visits_and_certificate(case: Case, tolerance: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the kernel's visited tiles, the plan's, and the number of all; [B, H, N], or [B, K] in decoding."""
    from alibi_attn.attention.backends.fused.kernels import decode as of_decode
    from alibi_attn.attention.backends.fused.kernels import forward as of_forward

    spec, query, key, value = call_of(case, tolerance=tolerance)
    decoding = split_keys.is_split(spec, query)
    tiles = fused.plan(spec, query, key, value, Norms.of(key, value) if decoding else None)
    shape = tile_shape("decode" if decoding else "forward", query.dtype, spec.head_dim, large=True)
    # The keys of every block are whole tiles, except at the end of the keys.
    asked = keys_in_tiles(spec, tiles)[:, :, :: TILE if decoding else shape.queries]
    if not decoding and spec.causal:  # a block visits no tile after its last query
        ends = spec.query_offset + torch.arange(shape.queries, spec.query_len + shape.queries, shape.queries)
        asked &= torch.arange(spec.key_len) < -(-ends[:, None] // shape.keys) * shape.keys
    asked = -(-asked.sum(-1) // shape.keys)
    every = asked.numel() * -(-spec.key_len // shape.keys)
    visits = collections.Counter()

    def counted(attend: Callable) -> Callable:
        def call(tile: Any, queries: Any, head: Any, *rest: Any, **named: Any) -> Any:
            visits[int(head.number.handle.data.flat[0]), int(queries.i.handle.data.flat[0])] += 1
            return attend(tile, queries, head, *rest, **named)

        return call

    with contextlib.ExitStack() as stack:
        for module, name in (
            (of_forward, "attend_full"),
            (of_forward, "attend_partial"),
            (of_decode, "attend_partial"),
        ):
            stack.enter_context(unittest.mock.patch.object(module, name, counted(getattr(module, name))))
        fused.forward(spec, query, key, value, tiles)
    step, group = (1, spec.group) if decoding else (shape.queries, 1)
    if decoding:
        asked, every = asked[:, :: spec.group, :1], every // spec.group
    batch, heads, blocks = asked.shape
    counts = [[visits[bh * group, n * step] for n in range(blocks)] for bh in range(batch * heads)]
    return np.array(counts).reshape(asked.shape), asked.numpy(), every


def refusal(dtype: str, head_dim: int) -> str | None:
    """The reason why `fused` rejects a call in the interpreter, or None."""
    x = torch.zeros(1, 1, 9, head_dim, dtype=getattr(torch, dtype))
    return fused.why_not(make_spec(x, x, x, return_lse=True), x, x, x)


def _prepare() -> None:
    quick_interpreter.prepare()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN, or with the largest integer
    assert bool(torch.empty(3).isnan().all())
    gc.freeze()  # the frameworks stay loaded
    atexit.register(gc.unfreeze)


def call_of(case: Case, *, tolerance: float) -> tuple[AttentionSpec[Tensor], Tensor, Tensor, Tensor]:
    (query, key, value, slopes), options = arguments(case, torch.float32)
    return make_spec(query, key, value, slopes, **options, tolerance=tolerance, return_lse=True), query, key, value
