"""The conformance suite on a GPU, without pytest: every case in bf16, fp16 and fp32, and the kernels' certificate under attack.

    python tests/support/conformance_on_device.py results.json [draws]        exit status 1 where something is wrong

Several processes share the device, for most of the time goes into compiling.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from attention_cases import CASES, INSIDE, Case
from attention_checks import answer, assert_exact
from certificate_attack import Attack, dropped, random_attack
from torch import Tensor

from alibi_attn.attention.bounds import Bounds
from alibi_attn.attention.certify import planned
from alibi_attn.attention.shapes import PLAN_ROWS
from alibi_attn.attention.spec import AttentionSpec

DTYPES = {"bfloat16": 2.0**-12, "float16": 2.0**-15, "float32": 2.0**-28}  # with their tolerances, eps / 32
TOGETHER = 100  # draws that a process takes at a time


def conform(case: Case, dtype: str, device: str) -> None:
    """Raises where something is wrong."""
    got = answer(case, getattr(torch, dtype), device=device, backend="fused")
    assert_exact(case, getattr(torch, dtype), got, tolerance=DTYPES[dtype])


def attacked(seeds: range, device: str) -> list[tuple[int, float, float]]:
    """For every draw: (seed, dropped mass / tolerance, share of the keys that are skipped)."""
    found = []
    for seed in seeds:
        attack = drawn(seed, device)
        lost, share = dropped(attack, lambda *call: certificate(*call, device=device))
        found.append((seed, lost / attack.tolerance, share))
    return found


def drawn(seed: int, device: str) -> Attack:
    """An attack in a dtype that the kernels take there; the interpreter multiplies bfloat16 wrongly."""
    attack = random_attack(seed)
    taken = ("float32", "float16") if device == "cpu" else ("float32", "float16", "bfloat16")
    return dataclasses.replace(attack, dtype=attack.dtype if attack.dtype in taken else "float32", refine=False)


def certificate(spec: AttentionSpec[Tensor], *tensors: Tensor, device: str = "cpu") -> Bounds:
    """What the kernels on a device find, in whole keys; on the host."""
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(spec)
        if isinstance(value := getattr(spec, field.name), Tensor)
    }
    _, found = planned(dataclasses.replace(spec, **moved), *(x.to(device) for x in tensors), rows=PLAN_ROWS)
    return Bounds(found.left.cpu(), found.right.cpu(), found.pins.cpu())


def main(out: Path, draws: int) -> int:
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context) as executor:
        asked = {
            executor.submit(conform, case, dtype, "cuda"): f"{dtype} {case}"
            for dtype in DTYPES
            for case in (*CASES, *INSIDE)
        }
        attacks = [
            executor.submit(attacked, range(start, min(start + TOGETHER, draws)), "cuda")
            for start in range(0, draws, TOGETHER)
        ]
        wrong = {}
        for future in concurrent.futures.as_completed(asked):
            if (error := future.exception()) is not None:
                wrong[asked[future]] = said = "".join(traceback.format_exception(error))
                print(f"WRONG {asked[future]}\n{said}", flush=True)
        print(
            f"{len(asked) - len(wrong)} of {len(asked)} cases are right, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        lost = [draw for future in attacks for draw in future.result()]
    broken = [draw for draw in lost if not draw[1] <= 1]
    result = {
        "cases": len(asked), "wrong": wrong, "draws": len(lost), "broken": broken, "device": torch.cuda.get_device_name(),
        "draws_that_skip": sum(share > 0 for _, _, share in lost), "worst": max((draw[1] for draw in lost), default=0.0),
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1))
    print(f"{len(lost)} attacks, {len(broken)} broken, worst {result['worst']:.3g} of the tolerance")
    return int(bool(wrong or broken))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3000))
