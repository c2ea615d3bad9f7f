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
import pytest
import quick_interpreter
import torch
from attention_calls import Watched, assert_close, draw, loss
from attention_cases import Case
from attention_checks import answer, arguments
from certificate_attack import keys_in_tiles
from torch import Tensor

from alibi_attn.attention.api import alibi_attention, head_reach
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import split_keys
from alibi_attn.attention.backends.fused.configs import tile_shape
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.operators.schema import Arguments


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


def bad_numbers_reach_only_those_who_see_them() -> None:
    """Tests the diagonal of plain causal attention, whose tiles are read without checks if all numbers are finite."""
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    before = alibi_attention(q, k, v, backend="fused")
    for tensor, at, bad in ((k, 150, torch.nan), (v, 220, torch.nan), (v, 220, torch.inf), (v, 299, torch.nan)):
        clean, tensor[0, 1, at, 3] = tensor[0, 1, at, 3].item(), bad
        output = alibi_attention(q, k, v, backend="fused")
        tensor[0, 1, at, 3] = clean
        torch.testing.assert_close(output[:, 1, :at], before[:, 1, :at])
        torch.testing.assert_close(output[:, 0], before[:, 0])
        assert not bool(output[0, 1, at:].isfinite().all(-1).any()), f"{bad} at {at} left no trace"


def operator_changes_no_bit() -> list[tuple[str, set[str]]]:
    """For a plain, a masked and a gated call, the node that autograd records in eager code, and our operators under a mode.

    Checks that outputs and gradients are identical with and without the mode.
    """
    q, k, v = (torch.randn(1, 4, 70, 16, requires_grad=True) for _ in range(3))
    gates = torch.nn.functional.logsigmoid(torch.randn(1, 4, 70) + 2).requires_grad_()
    mask, offset = torch.rand(1, 70) < 0.8, torch.tensor([0])
    calls = {
        "plain": lambda: alibi_attention(q, k, v, return_lse=True, backend="fused"),
        "masked": lambda: alibi_attention(
            q, k, v, causal=False, key_mask=mask, query_offset=offset, return_lse=True, backend="fused"
        ),
        "gated": lambda: forgetting_attention(q, k, v, gates, return_lse=True, backend="fused"),
    }
    found = []
    for name, call in calls.items():
        leaves = (q, k, v, gates) if name == "gated" else (q, k, v)
        results = []
        for mode in (contextlib.nullcontext(), watched := Watched()):
            with mode:
                output, lse = call()
                results.append((output, lse, *torch.autograd.grad(output.square().sum() + lse.sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
        found.append((results[0][0].grad_fn.name(), watched.seen))
    return found


def compiled_and_checked() -> None:
    """Checks opcheck, dynamic torch.compile(fullgraph=True), autocast and checkpointing."""
    q, k, v = (torch.randn(1, 4, 12, 8, requires_grad=True) for _ in range(3))
    slopes = torch.rand(4, requires_grad=True)
    arguments = tuple(Arguments.of(make_spec(q, k, v, slopes, tolerance=1e-7), q, k, v))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.alibi_attn.fused_forward.default, arguments, test_utils=tests)

    def loss(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        output, lse = alibi_attention(q, k, v, m, return_lse=True, backend="fused")
        return (output**2).sum() + lse.sum()

    leaf = (q, k, v, slopes)
    eager = torch.autograd.grad(loss(*leaf), leaf)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (12, 10):
        cut = [x[:, :, :length] for x in (q, k, v)]
        plain, fast = (torch.autograd.grad(f(*cut, slopes), leaf) for f in (loss, compiled))
        assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True)), length
    again = torch.utils.checkpoint.checkpoint(loss, *leaf, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(eager, torch.autograd.grad(again, leaf), strict=True))
    with torch.autocast("cpu", torch.float16):
        assert alibi_attention(q, k, v, backend="fused").dtype == torch.float16
    assert int(head_reach(q, k, backend="fused").max()) <= 12


def transformed_is_a_loop() -> None:
    """Checks torch.func: gradients per batch entry equal those of each entry alone; unsupported transforms raise."""
    inputs = draw(3, b=1, h=2, k=1, t=40, d=16, requires_grad=False)

    def of_entry(*x: Tensor, **options: float) -> Tensor:
        return loss(*x, backend="fused", **options)

    each = torch.vmap(torch.func.grad(of_entry, argnums=(0, 1, 2, 3)))(*inputs)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in inputs]
        assert_close([x[i] for x in each], torch.autograd.grad(of_entry(*leaves), leaves))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.jacrev(torch.func.grad(of_entry))(*(x[0] for x in inputs))
    with pytest.raises(RuntimeError, match="forward mode was requested"):
        torch.func.jvp(of_entry, tuple(x[0] for x in inputs), tuple(x[0] for x in inputs))
    dropped = functools.partial(of_entry, dropout_p=0.5)
    torch.manual_seed(3)
    assert len(torch.vmap(dropped, randomness="different")(*inputs).unique()) == 3
    same = torch.vmap(dropped, randomness="same")(*(x[:1].expand_as(x) for x in inputs))
    assert len(same.unique()) == 1, "with the same seed entries drop alike"


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
