"""The conformance suite on a GPU, without pytest: every case in bf16, fp16 and fp32, tables, and attacks on the certificate.

    python tests/support/interpreter/conformance_on_device.py results                       on a GPU
    TRITON_INTERPRET=1 python tests/support/interpreter/conformance_on_device.py results    simulating one

Options: --draws 3000, --first SEED (of the first draw), --cases N (of each dtype), --seconds S (cases and attacks not begun by
then are left out, and counted).
The first check is that of a step that no GPU had run when this was written: the last program of a head makes the plan.
It saves a record; the exit status is 1 if a check fails. Several processes share the device, because compiling takes
most of the time. Uninitialized memory is filled with NaN.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import device_arithmetic
import fixed_in_interpreter as fixed
import toeplitz_calls
import torch
from attention_cases import CASES, INSIDE, KEY_BIASES, Case
from attention_checks import answer, assert_exact, without_gradients
from certificate_attack import Attack, dropped, keys_in_tiles, native_keys, random_attack
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.plan import How, planned
from alibi_attn.attention.backends.fused.space import Plan
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import key_tiles
from alibi_attn.attention.run import decoding
from alibi_attn.nn import ALiBiAttention, KVCache
from alibi_lab import records

DTYPES = {"bfloat16": 2.0**-12, "float16": 2.0**-15, "float32": 2.0**-28}  # dtypes and their tolerances, eps / 32
# B, H, K and tokens of plans: from one program to 32,768 that race for 64 heads, and groups whose heads share a plan.
RACES = ((1, 1, 1, 64), (4, 16, 16, 32768), (32, 16, 4, 512), (64, 32, 4, 64), (1, 4, 2, 131072))
Draw = tuple[int, float, float, float]  # what `attacked` finds
# Random calls with a table that have masks, segments, windows, offsets, groups, few queries; and two long ones.
TABLES: tuple[int | bool, ...] = (0, 10, 11, 17, 19, 27, 35, 41, 53, True, False)
CACHES = "reach, capacity", "capacity"
TOGETHER = 10  # draws per task of a worker process
NARROW, WIDE = 5, 64  # the head sizes of draws on a device: with all sizes, 2,000 draws compile 1,460 kernels, so 316


def conform(case: Case, dtype: str, device: str) -> float:
    """Returns the largest error as a share of the allowed error; raises if it is larger."""
    number = getattr(torch, dtype)
    with _arithmetic(device, against_us=False, dtype=dtype):
        calls = [run(case, number, device=device, backend="fused") for run in (answer, without_gradients)]
    return max(assert_exact(case, number, got, tolerance=DTYPES[dtype], device=device) for got in calls)


def conform_table(seed: int | bool, dtype: str, device: str) -> float:
    """`conform` for a random call with a table of distances, or a long one that is causal or not."""
    with _arithmetic(device, against_us=False, dtype=dtype):
        return toeplitz_calls.check(toeplitz_calls.seeded(seed, dtype), "fused", device)


@torch.no_grad()
def conform_fixed(slope: float, dtype: str, device: str) -> float:
    """`conform` for scores that are just within and just beyond what weights without online softmax may have."""
    number, nearer = getattr(torch, dtype), 100 if slope > 0 else 0
    with _arithmetic(device, against_us=False, dtype=dtype):
        for digits, online in ((-0.3, 0), (0.3, nearer or fixed.EVERYWHERE)):
            asked = digits + slope * nearer * fixed.LOG2E * (digits > 0)
            distances, error = fixed.error_beyond_the_nearest(number, asked, slope, device)
            assert all(online <= x <= online + 10 for x in distances), f"{distances} at {digits} digits"
            assert error <= 64 * DTYPES[dtype], f"off by {error} at {digits} digits"
        assert not bool(fixed.without_proof(number, device)[:, :, 64:127].isfinite().any()), (
            "softmax is online everywhere"
        )
    return error / (64 * DTYPES[dtype])


@torch.no_grad()
def conform_cache(kind: str, dtype: str, device: str) -> float:
    """`conform` for tokens through a static cache, next to one pass: one by one through kernels that append, and chunks."""
    torch.manual_seed(0)
    layer = ALiBiAttention(64, 4, qk_norm=True, slopes=[4.0, 3.0, 1.5, 0.001]).eval().to(device, getattr(torch, dtype))
    x = torch.randn(2, 100, 64, device=device, dtype=getattr(torch, dtype))
    near = layer.reach_cache(score_bound=9.0, tolerance=1e-6, capacity=128)
    cache = KVCache(capacity=128) if kind == "capacity" else near
    steps = [3, *[1] * 40, 30, *[1] * 27] if device != "cpu" else [3, 1, 1, 30, 1]
    parts = x[:, : sum(steps)].split(steps, dim=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_arithmetic(device, against_us=False, dtype=dtype))
        if device == "cpu":
            stack.enter_context(mock.patch.object(decoding, "_on_cpu", return_value=False))
        found = torch.cat([layer(part, cache=cache) for part in parts], 1).double()
    whole = layer(x[:, : sum(steps)]).double()
    share = float((found - whole).abs().max() / (64 * 8 * DTYPES[dtype] * whole.abs().max()))
    assert share <= 1, f"tokens through a cache ({kind}) differ from one pass by {share} of the allowed error"
    return share


def plans_that_differ(
    shape: tuple[int, int, int, int], device: str, repeats: int, plan: Callable[..., tuple[Plan, Bounds]] = planned
) -> int:
    """How many of `repeats` plans of two calls in turns differ from the first of their call, or from what their reach implies.

    The calls have equal shapes, so memory that a program reads too early holds the numbers of the other call.
    """
    b, h, k, tokens = shape
    dtype, rows = torch.float32 if device == "cpu" else torch.bfloat16, fused.plan_rows(tokens)
    query, key = (torch.randn(b, heads, tokens, 64, device=device, dtype=dtype) for heads in (h, k))
    calls, wrong = [(query * scale, key) for scale in (0.1, 4.0)], 0
    first: list[Tensor | None] = [None, None]
    for repeat in range(2 * repeats):
        of_call = calls[repeat % 2]
        spec = make_spec(*of_call, of_call[1])
        found, bounds = plan(spec, *of_call, None, How(rows, shared=rows == TILE))
        tensor = torch.cat([found.bands.flatten(), found.outlier_tiles.flatten(), found.weight.flatten()])
        known = tensor if (one := first[repeat % 2]) is None else one
        first[repeat % 2] = known
        implied = torch.equal(found.bands, key_tiles(spec, bounds, rows=rows).bands)
        wrong += not (torch.equal(tensor, known) and implied)
    return wrong


def attacked(seeds: range, device: str, *, biased: bool = False, forgetful: bool = False) -> list[Draw]:
    """For every draw: (seed, dropped mass / tolerance, share of skipped keys, the same share by torch or the C++ kernels).

    Args:
        biased: with biases of keys, whose certificate is compared with that of the C++ kernels.
        forgetful: the certificate ignores them.
    """
    found = []
    for seed in seeds:
        attack = drawn(seed, device, biased=biased)
        theirs = dropped(attack, native_keys if biased else None)[1]
        with _arithmetic(device, against_us=True, dtype=attack.dtype):
            lost, share = dropped(attack, functools.partial(certificate, device=device, forgetful=forgetful))
        found.append((seed, lost / attack.tolerance, share, theirs))
    return found


def drawn(seed: int, device: str, *, biased: bool = False) -> Attack:
    """An attack in a dtype that the kernels support; every fourth has wide heads."""
    attack, wide = random_attack(seed, biased=biased), seed % 4 == 0
    return dataclasses.replace(
        attack,
        dtype="float16" if attack.dtype == "float64" else attack.dtype,
        refine=False,
        head_dim=attack.head_dim * (16 if wide else 1) if device == "cpu" else WIDE if wide else NARROW,
    )


def certificate(
    spec: AttentionSpec[Tensor], *tensors: Tensor, device: str = "cpu", forgetful: bool = False
) -> Bounds | Tensor:
    """The bounds that the kernels compute on a device, in whole keys, copied to the host; with biases the keys in their tiles."""
    if spec.key_bias is not None:
        bias = spec.key_bias.masked_fill(spec.key_bias > -math.inf, 0.0) if forgetful else spec.key_bias
        spec = dataclasses.replace(spec, key_bias=bias)
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(spec)
        if isinstance(value := getattr(spec, field.name), Tensor)
    }
    rows = PLAN_ROWS if spec.key_bias is None else TILE
    plan, found = planned(dataclasses.replace(spec, **moved), *(x.to(device) for x in tensors), How(rows))
    if spec.key_bias is not None:
        return keys_in_tiles(spec, plan)
    return Bounds(found.left.cpu(), found.right.cpu(), found.outlier_tiles.cpu())


def main(out: Path, draws: int, first: int, cases: int | None, seconds: float) -> int:
    started = datetime.datetime.now(datetime.UTC)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = multiprocessing.get_context("spawn")
    end, workers = time.monotonic() + seconds, min(16, os.cpu_count() or 1)
    races, repeats = (RACES, 200) if device == "cuda" else (((1, 4, 2, 130),), 1)
    _prepare()
    differ = sum(plans_that_differ(shape, device, repeats) for shape in races if cases != 0)
    print(f"{differ} plans differ: each is made by the program of its head that finishes last", flush=True)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare) as executor:
        asked: dict[Future[float], tuple[str, str]] = {}
        checks: tuple[tuple[Callable[..., float], str, Sequence[object], Iterable[str]], ...] = (
            (conform_cache, "{}", CACHES, DTYPES),
            (conform, "{}", (*CASES, *INSIDE, *KEY_BIASES), DTYPES),
            (conform_fixed, "fixed, slope {}", (0.0, 0.05), ("bfloat16", "float16")),
            (conform_table, "table {}", TABLES, DTYPES),
        )
        for check, name, inputs, dtypes in checks:
            for given, dtype in itertools.product(inputs[:cases], dtypes):
                asked[executor.submit(check, given, dtype, device)] = dtype, name.format(given)
        attacks = [
            executor.submit(attacked, range(start, min(start + TOGETHER, first + draws)), device)
            for start in range(first, first + draws, TOGETHER)
        ]
        conformed = _conformed(asked, end)
        concurrent.futures.wait(attacks, timeout=max(end - time.monotonic(), 0.0))
        executor.shutdown(cancel_futures=True)
    found = [draw for future in attacks if not future.cancelled() for draw in future.result()]
    broken = [seed for seed, lost, _, _ in found if not lost <= 1]
    metrics = {
        "plans_that_differ": differ,
        **conformed,
        "draws": len(found),
        "draws_broken": len(broken),
        "draws_that_skip": sum(share > 0 for _, _, share, _ in found),
        "worst_share_of_tolerance": max((lost for _, lost, _, _ in found), default=None),
        "mean_skipped_share": sum(share for _, _, share, _ in found) / max(len(found), 1),
        "mean_skipped_share_of_torch": sum(theirs for _, _, _, theirs in found) / max(len(found), 1),
    }
    record = records.make(
        "conformance",
        "fused/device" if device == "cuda" else "fused/interpreted",
        config={"draws": draws, "first": first},
        metrics=metrics,
        started=started,
    )
    print(f"{len(found)} of {draws} draws, broken: {broken or 'none'}\n{records.save(record, out)}")
    return int(bool(differ or conformed["cases_wrong"] or broken))


def _conformed(asked: Mapping[Future[float], tuple[str, str]], end: float) -> dict[str, int]:
    """How many cases were computed, were wrong, which is printed, and had not begun by `end`."""
    late = concurrent.futures.wait(asked, timeout=max(end - time.monotonic(), 0.0)).not_done
    left_out, wrong = {future for future in late if future.cancel()}, 0
    for future in concurrent.futures.as_completed(asked.keys() - left_out):
        if (error := future.exception()) is not None:
            wrong += 1
            print("WRONG", *asked[future], "".join(traceback.format_exception(error)), flush=True)
    cases = len(asked) - len(left_out)
    print(f"{cases - wrong} of {cases} cases are right, {len(left_out)} left out", flush=True)
    return {"cases": cases, "cases_left_out": len(left_out), "cases_wrong": wrong}


def _arithmetic(device: str, *, against_us: bool, dtype: str) -> contextlib.AbstractContextManager[None]:
    """The device's arithmetic, or an emulation of it.

    fp32 is compared with torch, whose exponential is more accurate than a GPU's, so the emulation's must be exact.
    """
    if device != "cpu":
        return contextlib.nullcontext()
    return device_arithmetic.of_a_device("against us" if against_us else "exact" if dtype == "float32" else "random")


def _prepare() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seconds", type=float, default=threading.TIMEOUT_MAX)
    sys.exit(main(**vars(parser.parse_args())))
