"""`alibi bench gpu`: our Triton kernels on one GPU compared with what users would run instead; correctness first, then time.

The benchmark ends within its time budget: lengths grow, records are rewritten after each length, and they list what did not fit
into the time or the memory. The scale "smoke" tests this file: the same code at tiny sizes on a CPU, in Triton's interpreter.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from alibi_attn import alibi_attention, alibi_slopes
from alibi_lab.measure.decoding import WITH_CACHE, peers_of_one_query
from alibi_lab.measure.gpu_rows import KINDS, TOKENS, Inputs, measured, unmeasured
from alibi_lab.measure.harness import Config, Row, Rows, Say, attention_config, keep, number, whole_ms
from alibi_lab.measure.peers import Peer, eager, flash_attn, flex, rank_two, sdpa_causal, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours, ours_with_cache

LENGTHS = tuple(2**n for n in range(10, 21))
SHAPES = ((16, 128), (32, 64))
SCALES = ("full", "smoke")
PATIENCE_S = 3.0  # a peer whose forward plus backward would take longer is skipped
CHECKED_LENGTH = 777
CHECKED: tuple[dict[str, object], ...] = (
    {},
    {"causal": False},
    {"window": 100},
    {"scale": 0.2},
    {"query_offset": 40},
    {"query_offset": -300},
    {"kv_heads": 2},
    {"queries": 3, "kv_heads": 2},
    {"causal": False, "window": 50},
    {"masked": True},
    {"segments": True},
)


def gpu_peers(*, compiled: bool = True) -> list[Peer]:
    """The peers of training steps. `compiled`: compile FlexAttention, as its users do."""
    causal = sdpa_causal.PEER
    flash, cudnn = (sdpa_causal.causal_by(x) for x in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))
    return [
        Peer("ours", ours("fused"), "backend='fused'"),
        causal,
        replace(causal, name=f"{causal.name}, flash", prepare=flash, note=f"{causal.note}; flash kernel"),
        replace(causal, name=f"{causal.name}, cuDNN", prepare=cudnn, note=f"{causal.note}; cuDNN's kernel"),
        sdpa_dense_bias.PEER,
        rank_two.PEER,
        eager.PEER,
        Peer(
            flex.NAME,
            functools.partial(flex.flex, compiled=compiled),
            f"score_mod and BlockMask, {'compiled for each length' if compiled else 'not compiled and without backward'}",
            longest_backward=2**62 if compiled else 0,
        ),
        *flash_attn.installed(),
    ]


def gpu(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    kinds: Sequence[str] = KINDS,
    seconds: float = 540.0,
    scale: str = "full",
    say: Say = print,
) -> list[Path]:
    """Checks and measures, saves a training and a decoding record per kind and shape, and returns their paths.

    `forward_ms` is the forward pass of a training step, `backward_ms` the rest of the step. Errors are those of the last
    queries (see `correctness.py`).

    Args:
        lengths: in tokens, T = S, and for decoding the cached tokens; a batch has TOKENS tokens, at least one sequence.
        shapes: (number of heads, head size).
        kinds: kinds of input: "noise" is standard normal, "peaked" has queries three times as long.
        seconds: for everything; later measurements are left out, with the reason in the record.
        scale: "full", or "smoke" for a CPU with Triton's interpreter.

    Raises:
        ValueError: no CUDA device, or, at scale "smoke", no interpreter.
        RuntimeError: our kernels were wrong, and nothing was timed; or a peer was wrong, and the records are kept.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r} but must be 'full' or 'smoke'")
    smoke = scale == "smoke"
    device = torch.device("cpu" if smoke else "cuda")
    if not smoke and not torch.cuda.is_available():
        raise ValueError(
            "alibi bench gpu needs a CUDA device but there is none; pass --scale smoke to test it on a CPU"
        )
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds has {', '.join(sorted(unknown))} but must be of {', '.join(KINDS)}")
    end = time.perf_counter() + seconds
    dtypes = (torch.float32,) if smoke else (torch.bfloat16, torch.float16, torch.float32)
    configs = {
        _name(shape, kind, decoding, device): _config(shape, kind, decoding, lengths, dtypes[0], device)
        for shape in shapes
        for kind in kinds
        for decoding in (False, True)
    }
    worst, wrong = 0.0, list[str]()

    def steps() -> Iterator[Mapping[str, Rows]]:
        nonlocal worst
        cases = [(dtype, case) for dtype in dtypes for case in CHECKED[: 2 if smoke else None]]
        checks = _all_checked(cases, device)
        worst = max(number(row["error"]) / number(row["allowed"]) for row in checks)
        for turn, shape in enumerate(shapes):
            for row in checks:
                yield {_name(shape, kind, False, device): {"correctness": row} for kind in kinds}
            until = time.perf_counter() + (end - time.perf_counter()) / (len(shapes) - turn)
            for step in _measured_shape(shape, lengths, kinds, dtypes[0], device, until=until):
                wrong.extend(
                    f"{name}: at {row['length']} tokens {row['why_not']}"
                    for name, rows in step.items()
                    for row in rows.values()
                    if row["right"] is False
                )
                yield step

    paths = keep(out, configs, steps(), summary=lambda columns: {"worst_error_share": worst}, say=say)
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return paths


def _name(shape: tuple[int, int], kind: str, decoding: bool, device: torch.device) -> str:
    folder = "gpu-smoke" if device.type == "cpu" else "gpu"
    return f"{folder}/{'decoding-' if decoding else ''}{kind}-{shape[0]}x{shape[1]}"


def _config(
    shape: tuple[int, int], kind: str, decoding: bool, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Config:
    return attention_config(
        _peers(decoding, device),
        lengths,
        heads=shape[0],
        head_dim=shape[1],
        dtype=str(dtype).removeprefix("torch."),
        kind=kind,
        smoke=device.type == "cpu",
        device=device.type,
    )


def _peers(decoding: bool, device: torch.device) -> list[Peer]:
    if not decoding:
        return gpu_peers(compiled=device.type == "cuda")
    return [
        Peer("ours", ours_with_cache("fused"), WITH_CACHE),
        Peer("ours, untold", ours("fused"), "backend='fused', which meets all keys"),
        *peers_of_one_query(),
    ]


def _measured_shape(
    shape: tuple[int, int],
    lengths: Sequence[int],
    kinds: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    until: float,
) -> Iterator[dict[str, dict[str, Row]]]:
    """Yields the rows by record and peer of each length: training steps, then decoding."""
    pace: dict[str, float] = {}  # seconds of a peer's training step per score and head
    for length in sorted(lengths):
        scores = length * max(length, TOKENS)
        step: dict[str, dict[str, Row]] = {}
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
                    name = _name(shape, kind, decoding, device)
                    step.setdefault(name, {})[peer.name] = row
                if not decoding and (seconds := _seconds(rows)) > 0:
                    pace[peer.name] = seconds / scores
        yield step


def _why_not(peer: Peer, expected_s: float, until: float) -> str | None:
    if time.perf_counter() > until:
        return "no time was left"
    if not peer.is_ours and expected_s > PATIENCE_S:
        return f"forward and backward would take {expected_s:.0f} s"
    return None


def _seconds(rows: Mapping[str, Row]) -> float:
    """Forward plus backward of the slowest kind; 0 = not timed."""
    return max(whole_ms(row) for row in rows.values()) / 1e3


def _all_checked(calls: Sequence[tuple[torch.dtype, dict[str, object]]], device: torch.device) -> list[Row]:
    """One row per checked call. On a GPU several processes share it, because compiling dominates the time."""
    if device.type != "cuda":
        return [_check(*call, device) for call in calls]
    workers, context = min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as executor:
        return list(executor.map(_check, *zip(*calls, strict=True), [device] * len(calls)))


def _check(dtype: torch.dtype, case: dict[str, object], device: torch.device) -> Row:
    """Compares outputs and gradients of one call with fp64; twice the error of `dense` (fp32 on a GPU) is allowed."""
    generator = torch.Generator().manual_seed(0)
    length = CHECKED_LENGTH if device.type == "cuda" else 40
    options = dict(case)
    queries, kv_heads = int(str(options.pop("queries", length))), int(str(options.pop("kv_heads", 4)))
    if options.pop("masked", False):
        options["key_mask"] = (torch.rand(2, length, generator=generator) < 0.7).to(device)
    if options.pop("segments", False):
        options["segment_ids"] = (torch.arange(length) // 100).expand(2, length).to(device)
    shapes = [(2, 4, queries, 64), (2, kv_heads, length, 64), (2, kv_heads, length, 64)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(device, dtype)
    results: dict[str, list[Tensor]] = {}
    ways = (("ours", "fused", dtype), ("plain", "dense", dtype), ("true", "reference", torch.float64))
    for name, backend, work in ways:
        leaf = [x.to(work).detach().requires_grad_() for x in drawn]
        slopes = torch.tensor(alibi_slopes(4), dtype=torch.float32, device=device, requires_grad=True)
        output = alibi_attention(*leaf, slopes, **options, backend=backend)  # type: ignore[call-overload]
        gradients = torch.autograd.grad(output, [*leaf, slopes], grad.to(work))
        results[name] = [x.detach().double() for x in (output, *gradients)]
    unit = torch.finfo(dtype).eps
    worst = (0.0, 1.0)
    for actual, plain, true in zip(results["ours"], results["plain"], results["true"], strict=True):
        error = float((actual - true).abs().max())
        allowed = 2 * float((plain - true).abs().max()) + 4 * unit * max(float(true.abs().max()), 1e-30)
        worst = max(worst, (error, allowed), key=lambda pair: pair[0] / pair[1])
    if not worst[0] <= worst[1]:
        raise RuntimeError(f"fused is wrong in {dtype} with {case}: error {worst[0]:.2e} but {worst[1]:.2e} is allowed")
    return {"case": str(case), "dtype": str(dtype), "error": worst[0], "allowed": worst[1]}
