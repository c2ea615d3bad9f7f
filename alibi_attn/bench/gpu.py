"""`alibi bench gpu`: our Triton kernels on one GPU against what users would pick instead; correctness first, then time.

It ends within its budget: lengths grow, and what no longer fits the time is left out of the record. `smoke` runs the same path on
a CPU in Triton's interpreter, at sizes that mean nothing, to test this file.
"""

import concurrent.futures
import contextlib
import datetime
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn import records
from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.plan import planned
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Lengths
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.columns import Columns, append
from alibi_attn.bench.peers import Attention
from alibi_attn.slopes import alibi_slopes

LENGTHS = tuple(2**n for n in range(10, 21))
HEADS = ((16, 128), (32, 64))
TOKENS = 16384  # batch · length, while the length is below it
DENSE, DENSE_LONGEST = "SDPA + dense bias", 8192
FLEX_LONGEST = 131072
CHECKED_LENGTH = 777
CHECKED: tuple[dict[str, object], ...] = (
    {}, {"causal": False}, {"window": 100}, {"scale": 0.2}, {"query_offset": 40}, {"query_offset": -300},
    {"kv_heads": 2}, {"queries": 3, "kv_heads": 2}, {"causal": False, "window": 50}, {"masked": True}, {"segments": True},
)  # fmt: skip


def gpu(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    heads: Sequence[tuple[int, int]] = HEADS,
    kinds: Sequence[str] = ("noise", "peaked"),
    budget_s: float = 540.0,
    smoke: bool = False,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Check, measure, and keep two records for each kind of input and each shape of heads, one of them of decoding; their paths.

    Raises:
        ValueError: no CUDA device, or, with `smoke`, no interpreter.
        RuntimeError: a result was wrong; nothing is timed then.
    """
    device = torch.device("cpu" if smoke else "cuda")
    if not smoke and not torch.cuda.is_available():
        raise ValueError("alibi bench gpu measures on a CUDA device and there is none; smoke=True tests it without")
    dtypes = (torch.float32,) if smoke else (torch.bfloat16, torch.float16, torch.float32)
    folder = "gpu-smoke" if smoke else "gpu"
    turns = [(kind, num_heads, head_dim) for kind in kinds for num_heads, head_dim in heads]
    configs: list[dict[str, records.Json]] = [
        {
            "kind": kind, "heads": num_heads, "head_dim": head_dim, "dtype": str(dtypes[0]).removeprefix("torch."),
            "lengths": list(lengths), "smoke": smoke, "device": device.type,
        }
        for kind, num_heads, head_dim in turns
    ]  # fmt: skip
    for (kind, num_heads, head_dim), config in zip(turns, configs, strict=True):
        records.expect_new(out, "benchmark", f"{folder}/{kind}-{num_heads}x{head_dim}", config)
    end = time.perf_counter() + budget_s
    checked = _all_checked(
        [(dtype, asked) for dtype in dtypes for asked in CHECKED[: 2 if smoke else None]], device, say
    )
    errors = {name: [row[name] for row in checked] for name in ("case", "dtype", "error", "allowed")}
    paths = []
    for turn, ((kind, num_heads, head_dim), config) in enumerate(zip(turns, configs, strict=True)):
        started = datetime.datetime.now(datetime.UTC)
        columns: Columns = {"correctness": errors}
        decoding: Columns = {}
        until = time.perf_counter() + (end - time.perf_counter()) / (len(turns) - turn)
        for length in sorted(lengths):
            if time.perf_counter() > until:
                say(f"{kind} {num_heads}x{head_dim}: the time is spent before {length}")
                break
            drawn = _draw(kind, length, num_heads, head_dim, dtypes[0], device, smoke)
            step = _decoding(*drawn[:3])
            for into, rows in ((columns, _measured(*drawn, until=until, smoke=smoke)), (decoding, step)):
                for name, row in rows.items():
                    append(into, name, {"length": length, **row})
                    say(f"{kind} {num_heads}x{head_dim} {length:>8} {'decoding, ' * (into is decoding)}{name}: {row}")
        case = f"{kind}-{num_heads}x{head_dim}"
        worst = max(row["error"] / row["allowed"] for row in checked)  # type: ignore[operator]
        for name, curves in ((case, columns), (f"decoding-{case}", decoding)):
            made = records.make(
                "benchmark", f"{folder}/{name}", config=config, metrics={"worst_error_share": worst}, curves=curves,
                started=started,
            )  # fmt: skip
            paths.append(records.save(made, out))
    return paths


def _all_checked(
    calls: Sequence[tuple[torch.dtype, dict[str, object]]], device: torch.device, say: Callable[[str], None]
) -> list[dict[str, records.Json]]:
    """A row for each call. On a device several processes share it, for most of the time goes into compiling."""
    rows = []
    with contextlib.ExitStack() as stack:
        found: Iterable[dict[str, records.Json]] = (_check(*call, device) for call in calls)
        if device.type == "cuda":
            context = multiprocessing.get_context("spawn")
            executor = stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context)
            )
            found = executor.map(_check, *zip(*calls, strict=True), [device] * len(calls))
        for row in found:
            say(f"right: {row['dtype']} {row['case']}: error {row['error']:.1e}, allowed {row['allowed']:.1e}")
            rows.append(row)
    return rows


def _check(dtype: torch.dtype, asked: dict[str, object], device: torch.device) -> dict[str, records.Json]:
    """One call against fp64, output and gradients; twice the error of plain PyTorch in the same dtype is allowed."""
    generator = torch.Generator().manual_seed(0)
    length = CHECKED_LENGTH if device.type == "cuda" else 40
    options = dict(asked)
    queries, kv_heads = int(str(options.pop("queries", length))), int(str(options.pop("kv_heads", 4)))
    if options.pop("masked", False):
        options["key_mask"] = (torch.rand(2, length, generator=generator) < 0.7).to(device)
    if options.pop("segments", False):
        options["segment_ids"] = (torch.arange(length) // 100).expand(2, length).to(device)
    shapes = [(2, 4, queries, 64), (2, kv_heads, length, 64), (2, kv_heads, length, 64)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(device, dtype)
    found: dict[str, list[Tensor]] = {}
    for name, backend, work in (
        ("ours", "fused", dtype),
        ("plain", "dense", dtype),
        ("true", "reference", torch.float64),
    ):
        leaf = [x.to(work).detach().requires_grad_() for x in drawn]
        slopes = torch.tensor(alibi_slopes(4), dtype=torch.float32, device=device, requires_grad=True)
        output = alibi_attention(*leaf, slopes, **options, backend=backend)  # type: ignore[call-overload]
        gradients = torch.autograd.grad(output, [*leaf, slopes], grad.to(work))
        found[name] = [x.detach().double() for x in (output, *gradients)]
    unit = torch.finfo(dtype).eps
    worst = (0.0, 1.0)
    for ours, plain, true in zip(found["ours"], found["plain"], found["true"], strict=True):
        error = float((ours - true).abs().max())
        allowed = 2 * float((plain - true).abs().max()) + 4 * unit * max(float(true.abs().max()), 1e-30)
        worst = max(worst, (error, allowed), key=lambda pair: pair[0] / pair[1])
    if not worst[0] <= worst[1]:
        raise RuntimeError(
            f"fused is wrong in {dtype} with {asked}: error {worst[0]:.2e} but {worst[1]:.2e} is allowed"
        )
    return {"case": str(asked), "dtype": str(dtype), "error": worst[0], "allowed": worst[1]}


def _draw(
    kind: str, length: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, smoke: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1 if smoke else max(1, TOKENS // length), num_heads, length, head_dim)
    query, key, value, grad = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
    return query * 3 if kind == "peaked" else query, key, value, grad


def _measured(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, *, until: float, smoke: bool
) -> dict[str, dict[str, records.Json]]:
    """A row for each peer."""
    slopes = torch.tensor(alibi_slopes(query.shape[1]), dtype=torch.float32, device=query.device)
    b, h, n, d = query.shape
    spec = make_spec(query, key, value, slopes)
    with torch.no_grad():
        _, scores = fused.visits(spec, query, key, value)
        plan = _median_ms(lambda: fused.plan(spec, query, key, value), query.device)
    visited, causal = int(scores.sum()), b * h * n * (n + 1) // 2
    rows: dict[str, dict[str, records.Json]] = {}
    for name, (attention, longest) in _peers(smoke).items():
        if n > longest or time.perf_counter() > until:
            columns = ("forward_ms", "backward_ms", "plan_ms", "nominal_tflops", "computed_tflops")
            rows[name] = dict.fromkeys(columns)
            continue
        leaf = [x.detach().requires_grad_() for x in (query, key, value)]
        output = attention(leaf[0], leaf[1], leaf[2], slopes)
        with torch.no_grad():
            forward = _median_ms(lambda run=attention: run(query, key, value, slopes), query.device)  # type: ignore[misc]
        backward = _median_ms(
            lambda out=output, of=leaf: torch.autograd.grad(out, of, grad, retain_graph=True),  # type: ignore[misc]
            query.device,
        )
        seconds, flops = (forward + backward) / 1e3, 3.5 * 4 * d
        rows[name] = {
            "forward_ms": forward, "backward_ms": backward, "plan_ms": plan if name == "ours" else None,
            "nominal_tflops": flops * causal / seconds / 1e12,
            "computed_tflops": flops * visited / seconds / 1e12 if name == "ours" else None,
        }  # fmt: skip
    return rows


def _decoding(query: Tensor, key: Tensor, value: Tensor) -> dict[str, dict[str, records.Json]]:
    """A row for each peer. "ours" is told how long the keys are, as a cache tells it; "ours, untold" meets them all."""
    slopes = torch.tensor(alibi_slopes(query.shape[1]), dtype=torch.float32, device=query.device)
    query = query[:, :, -1:]
    spec, lengths = make_spec(query, key, value, slopes), Lengths.of(key, value)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: fused.decode(spec, query, key, value, lengths),
        "ours, untold": lambda: alibi_attention(query, key, value, slopes, backend="fused"),
        "causal, no bias": lambda: functional.scaled_dot_product_attention(query, key, value),
        DENSE: lambda: alibi_attention(query, key, value, slopes, backend="dense"),
    }
    with torch.no_grad():
        rows: dict[str, dict[str, records.Json]] = {
            name: {
                "forward_ms": _median_ms(call, query.device) if name != DENSE or key.shape[2] <= FLEX_LONGEST else None
            }
            for name, call in calls.items()
        }
        tiles, found = planned(spec, query, key, value, rows=TILE, shared=True, lengths=lengths)
    least = int(found.left.clamp(max=key.shape[2]).sum()) + int((found.pins >= 0).sum()) * TILE
    row_bytes = 2 * key.shape[-1] * key.element_size()
    rows["ours"] |= {
        "bytes_read": int(tiles.weight.sum()) * TILE * row_bytes, "bytes_least": least * row_bytes,
        "bytes_all": key.shape[:3].numel() * row_bytes,
    }  # fmt: skip
    return rows


def _peers(smoke: bool) -> dict[str, tuple[Attention, int]]:
    """By name: the function, and the longest input it is run on."""
    found: dict[str, tuple[Attention, int]] = {
        "ours": (lambda q, k, v, m: alibi_attention(q, k, v, m, backend="fused"), 2**30),
        "causal, no bias": (lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, is_causal=True), 2**18),
        DENSE: (lambda q, k, v, m: alibi_attention(q, k, v, m, backend="dense"), DENSE_LONGEST),
    }
    if smoke:
        return found
    found["FlexAttention, our mask"] = (lambda q, k, v, m: alibi_attention(q, k, v, m, backend="flex"), FLEX_LONGEST)
    found["FlexAttention"] = (
        lambda q, k, v, m: alibi_attention(q, k, v, m, backend="flex", tolerance=0.0),
        FLEX_LONGEST,
    )
    if importlib.util.find_spec("flash_attn") is not None:
        found["flash-attn"] = (_flash, 2**18)
    return found


def _flash(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    turned = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(*turned, causal=True, alibi_slopes=slopes).transpose(1, 2)


def _median_ms(call: Callable[[], object], device: torch.device, *, repeats: int = 7, budget_s: float = 1.5) -> float:
    """Warmed up once; on CUDA between events, so that launching counts only where the device waits for it."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < repeats and (not taken or time.perf_counter() < end):
        if device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            taken.append(before.elapsed_time(after))
        else:
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e3)
            break
    return statistics.median(taken)
