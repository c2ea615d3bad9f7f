"""The conformance suite on a GPU, without pytest: every case in bf16, fp16 and fp32, and attacks on the certificate.

    python tests/support/interpreter/conformance_on_device.py results [draws]                    on a GPU
    TRITON_INTERPRET=1 python tests/support/interpreter/conformance_on_device.py results [draws]    simulating one

It saves a record; the exit status is 1 if a check fails. Several processes share the device, because compiling takes
most of the time. Uninitialized memory is filled with NaN.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import device_arithmetic
import torch
from attention_cases import CASES, INSIDE, KEY_BIASES, Case
from attention_checks import answer, assert_exact
from certificate_attack import Attack, dropped, random_attack
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.plan import planned
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.spec import AttentionSpec
from alibi_lab import records

DTYPES = {"bfloat16": 2.0**-12, "float16": 2.0**-15, "float32": 2.0**-28}  # dtypes and their tolerances, eps / 32
TOGETHER = 50  # draws per task of a worker process


def conform(case: Case, dtype: str, device: str) -> float:
    """Returns the largest error as a share of the allowed error; raises if it is larger."""
    with _arithmetic(device, against_us=False, dtype=dtype):
        got = answer(case, getattr(torch, dtype), device=device, backend="fused")
    return assert_exact(case, getattr(torch, dtype), got, tolerance=DTYPES[dtype], device=device)


def attacked(seeds: range, device: str) -> list[tuple[int, float, float, float]]:
    """For every draw: (seed, dropped mass / tolerance, share of skipped keys, the same share by `bounds`)."""
    found = []
    for seed in seeds:
        attack = drawn(seed)
        theirs = dropped(attack)[1]
        with _arithmetic(device, against_us=True, dtype=attack.dtype):
            lost, share = dropped(attack, lambda *call: certificate(*call, device=device))
        found.append((seed, lost / attack.tolerance, share, theirs))
    return found


def drawn(seed: int) -> Attack:
    """An attack in a dtype that the kernels support; every fourth has wide heads."""
    attack = random_attack(seed)
    return dataclasses.replace(
        attack,
        dtype="float16" if attack.dtype == "float64" else attack.dtype,
        refine=False,
        head_dim=attack.head_dim * (16 if seed % 4 == 0 else 1),
    )


def certificate(spec: AttentionSpec[Tensor], *tensors: Tensor, device: str = "cpu") -> Bounds:
    """The bounds that the kernels compute on a device, in whole keys, copied to the host."""
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(spec)
        if isinstance(value := getattr(spec, field.name), Tensor)
    }
    _, found = planned(dataclasses.replace(spec, **moved), *(x.to(device) for x in tensors), rows=PLAN_ROWS)
    return Bounds(found.left.cpu(), found.right.cpu(), found.outlier_tiles.cpu())


def main(out: Path, draws: int) -> int:
    started = datetime.datetime.now(datetime.UTC)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = multiprocessing.get_context("spawn")
    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare) as executor:
        asked = {
            executor.submit(conform, case, dtype, device): (dtype, case)
            for dtype in DTYPES
            for case in (*CASES, *INSIDE, *KEY_BIASES)
        }
        attacks = [
            executor.submit(attacked, range(start, min(start + TOGETHER, draws)), device)
            for start in range(0, draws, TOGETHER)
        ]
        shares: list[tuple[str, str, float | None]] = []
        for future in concurrent.futures.as_completed(asked):
            dtype, case = asked[future]
            error = future.exception()
            shares.append((dtype, str(case), None if error else future.result()))
            if error is not None:
                print(f"WRONG {dtype} {case}\n{''.join(traceback.format_exception(error))}", flush=True)
        wrong = sum(share is None for _, _, share in shares)
        print(f"{len(asked) - wrong} of {len(asked)} cases are right", flush=True)
        found = []
        for future in attacks:
            found += future.result()
            print(f"{len(found)} attacks, worst {max(draw[1] for draw in found):.3g} of the tolerance", flush=True)
    broken = [seed for seed, lost, _, _ in found if not lost <= 1]
    metrics = {
        "cases": len(asked),
        "cases_wrong": wrong,
        "draws": len(found),
        "draws_broken": len(broken),
        "draws_that_skip": sum(share > 0 for _, _, share, _ in found),
        "worst_share_of_tolerance": max((lost for _, lost, _, _ in found), default=None),
        "mean_skipped_share": sum(share for _, _, share, _ in found) / max(len(found), 1),
        "mean_skipped_share_of_torch": sum(theirs for _, _, _, theirs in found) / max(len(found), 1),
    }
    columns = zip(*sorted(shares, key=str), strict=True)
    record = records.make(
        "conformance",
        "fused/device" if device == "cuda" else "fused/interpreted",
        config={"draws": draws},
        metrics=metrics,
        started=started,
        curves={"cases": dict(zip(("dtype", "case", "share_of_allowed"), map(list, columns), strict=True))},
    )
    print(f"broken draws: {broken or 'none'}\n{records.save(record, out)}")
    return int(bool(wrong or broken))


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
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3000))
