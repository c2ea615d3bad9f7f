"""`alibi bench gpu`: our Triton kernels on one GPU against what users would pick instead; correctness first, then time.

It ends within its budget: lengths grow, records are renewed after each, and say what did not fit the time or the memory. `smoke`
runs the same path on a CPU in Triton's interpreter, at sizes that mean nothing, to test this file.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.attention.api import alibi_attention
from alibi_attn.bench.columns import GrowingRecord, append
from alibi_attn.bench.gpu_rows import KINDS, TOKENS, Inputs, Row, measured, unmeasured
from alibi_attn.bench.peers import Peer, decoding_peers, gpu_peers, ours, ours_told
from alibi_attn.slopes import alibi_slopes

LENGTHS = tuple(2**n for n in range(10, 21))
HEADS = ((16, 128), (32, 64))
PATIENCE_S = 3.0  # a peer whose forward and backward together would take longer is not run
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
    kinds: Sequence[str] = KINDS,
    budget_s: float = 540.0,
    smoke: bool = False,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Check, measure, and keep two records for each kind of input and each shape of heads, one of them of decoding; their paths.

    `forward_ms` is the forward pass of a training step, `backward_ms` what a step takes longer. Errors are those of the last
    queries, see `exactness.py`.

    Args:
        lengths: tokens, T = S, and cached tokens; the batch has as many sequences as make TOKENS.
        heads: (number, size) of the heads.
        kinds: of input: "noise" is standard normal, "peaked" has queries three times as long.
        budget_s: seconds in all; what comes too late is left out, and said.

    Raises:
        ValueError: no CUDA device, or, with `smoke`, no interpreter.
        RuntimeError: a result of the kernels was wrong, and nothing is timed then; or, with the records kept, a peer was.
    """
    device = torch.device("cpu" if smoke else "cuda")
    if not smoke and not torch.cuda.is_available():
        raise ValueError("alibi bench gpu measures on a CUDA device and there is none; smoke=True tests it without")
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds has {', '.join(sorted(unknown))} but must be of {', '.join(KINDS)}")
    end = time.perf_counter() + budget_s
    dtypes = (torch.float32,) if smoke else (torch.bfloat16, torch.float16, torch.float32)
    asked = {
        (shape, kind, decoding): _asked(shape, kind, decoding, lengths, dtypes[0], device)
        for shape in heads for kind in kinds for decoding in (False, True)
    }  # fmt: skip
    for name, config in asked.values():
        records.expect_new(out, "benchmark", name, config)
    checked = _all_checked([(dtype, case) for dtype in dtypes for case in CHECKED[: 2 if smoke else None]], device, say)
    worst = max(row["error"] / row["allowed"] for row in checked)  # type: ignore[operator]
    paths, wrong = [], []
    for turn, shape in enumerate(heads):
        until = time.perf_counter() + (end - time.perf_counter()) / (len(heads) - turn)
        kept = {
            (kind, decoding): GrowingRecord(out, *asked[shape, kind, decoding], lambda _: {"worst_error_share": worst})
            for kind in kinds for decoding in (False, True)
        }  # fmt: skip
        for kind in kinds:
            for row in checked:
                append(kept[kind, False].curves, "correctness", row)
        _measure(shape, lengths, kept, dtypes[0], device, until=until, say=say)
        paths += [record.keep() for record in kept.values()]
        wrong += [f"{record.name}: {reason}" for record in kept.values() for reason in _wrong(record)]
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return paths


def _asked(
    shape: tuple[int, int], kind: str, decoding: bool, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[str, dict[str, records.Json]]:
    """(name, config) of a record."""
    smoke = device.type == "cpu"
    config: dict[str, records.Json] = {
        "kind": kind, "heads": shape[0], "head_dim": shape[1], "dtype": str(dtype).removeprefix("torch."),
        "lengths": list(lengths), "smoke": smoke, "device": device.type,
        "peers": {peer.name: peer.note for peer in _peers(decoding, device)},
    }  # fmt: skip
    folder = "gpu-smoke" if smoke else "gpu"
    return f"{folder}/{'decoding-' if decoding else ''}{kind}-{shape[0]}x{shape[1]}", config


def _peers(decoding: bool, device: torch.device) -> list[Peer]:
    if not decoding:
        return gpu_peers(compiled=device.type == "cuda")
    return [
        Peer("ours", ours_told("fused"), "the lengths of keys and values are remembered, as a KVCache does"),
        Peer("ours, untold", ours("fused"), "backend='fused', which meets all keys"),
        *decoding_peers(),
    ]


def _measure(
    shape: tuple[int, int], lengths: Sequence[int], kept: Mapping[tuple[str, bool], GrowingRecord], dtype: torch.dtype,
    device: torch.device, *, until: float, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Every length, training steps and then decoding; `kept`, by kind and whether it is decoding, are renewed after each."""
    kinds = list(dict.fromkeys(kind for kind, _ in kept))
    pace: dict[str, float] = {}  # seconds that a peer's training step took for each score of a head
    for length in sorted(lengths):
        scores = length * max(length, TOKENS)
        for decoding in (False, True):
            inputs = None
            for peer in _peers(decoding, device):
                why_not = _why_not(peer, 0.0 if decoding else pace.get(peer.name, 0.0) * scores, until)
                if why_not is None:
                    inputs = inputs or Inputs.draw(kinds, length, shape, dtype, device, decoding=decoding)
                    rows = measured(peer, inputs)
                else:
                    rows = {kind: unmeasured(peer, length, decoding=decoding, why_not=why_not) for kind in kinds}
                for kind, row in rows.items():
                    append(kept[kind, decoding].curves, peer.name, row)
                    say(f"{kept[kind, decoding].name} {length:>8} {peer.name}: {_said(row)}")
                if not decoding and (seconds := _seconds(rows)) > 0:
                    pace[peer.name] = seconds / scores
        for record in kept.values():
            record.keep()


def _why_not(peer: Peer, expected_s: float, until: float) -> str | None:
    if time.perf_counter() > until:
        return "no time was left"
    if not peer.is_ours and expected_s > PATIENCE_S:
        return f"forward and backward would take {expected_s:.0f} s"
    return None


def _said(row: Row) -> str:
    if row["why_not"] is not None:
        return str(row["why_not"])
    times = " + ".join(f"{row[way]:.3g}" for way in ("forward_ms", "backward_ms") if row.get(way) is not None)
    return f"{times} ms, error {row['relative_error']:.1e}"


def _seconds(rows: Mapping[str, Row]) -> float:
    """Of the slowest kind, forward and backward; 0 = none was timed."""
    times = [sum(float(str(row[way])) for way in ("forward_ms", "backward_ms") if row[way]) for row in rows.values()]
    return max(times) / 1e3


def _wrong(record: GrowingRecord) -> list[str]:
    """What is wrong in it, and what of ours could not run."""
    columns = [column for column in record.curves.values() if "right" in column]
    return [
        f"at {length} tokens {why_not}"
        for column in columns
        for length, right, why_not in zip(column["length"], column["right"], column["why_not"], strict=True)
        if right is False
    ]


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
    """One call against fp64, output and gradients; twice the error of `dense`, which is in fp32 on a GPU, is allowed."""
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
    for got, plain, true in zip(found["ours"], found["plain"], found["true"], strict=True):
        error = float((got - true).abs().max())
        allowed = 2 * float((plain - true).abs().max()) + 4 * unit * max(float(true.abs().max()), 1e-30)
        worst = max(worst, (error, allowed), key=lambda pair: pair[0] / pair[1])
    if not worst[0] <= worst[1]:
        raise RuntimeError(
            f"fused is wrong in {dtype} with {asked}: error {worst[0]:.2e} but {worst[1]:.2e} is allowed"
        )
    return {"case": str(asked), "dtype": str(dtype), "error": worst[0], "allowed": worst[1]}
