"""The conformance suite, random calls and attacks on the kernels of another system, run by qemu or Wine; saves a record.

    python tests/support/processes/conformance_emulated.py aarch64-linux results [draws]    # half an hour for 500 draws
    python tests/support/processes/conformance_emulated.py aarch64-linux-bf16 results [draws]
    python tests/support/processes/conformance_emulated.py x86_64-windows results [draws]

The same checks as in `test_native_emulated.py`. Needs `ziglang` (PyPI) and Debian's qemu-user-static or wine64.
"""

import datetime
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from attention_cases import CASES, KEY_BIASES
from attention_checks import answer, assert_exact
from certificate_attack import dropped, native_keys, random_attack
from differential_fuzz import fuzz
from emulated_kernels import TARGETS, TOLERANCE, Target, emulating, runner, why_not

from alibi_attn.attention.call.checks import dtype_name
from alibi_lab import records

WRONG = "cases_wrong", "draws_wrong", "attacks_broken"


def main(name: str, out: Path, draws: int) -> int:
    target = next(target for target in TARGETS if target.name == name)
    if reason := why_not(target):
        sys.exit(reason)
    started = datetime.datetime.now(datetime.UTC)
    torch.set_num_threads(2)  # of the emulated program too
    with tempfile.TemporaryDirectory() as folder, emulating(target, Path(folder)) as kernels:
        metrics = cases_of() | draws_of(draws, target) | attacks_of(draws, target)
        metrics["calls_emulated"] = kernels.calls
        record = records.make(
            "conformance", f"native/{target.name}", config=_config(target, draws), metrics=metrics, started=started
        )
    print(metrics, records.save(record, out), sep="\n")
    return int(any(metrics[name] for name in WRONG))


def cases_of() -> dict[str, float | None]:
    """Numbers of cases in all dtypes, and the largest error per dtype as a share of the allowed error."""
    cases, wrong, worst = (*CASES, *KEY_BIASES), 0, {}
    for dtype, tolerance in TOLERANCE.items():
        shares = []
        for case in cases:
            try:
                shares.append(assert_exact(case, dtype, answer(case, dtype, backend="native"), tolerance=tolerance))
            except AssertionError as error:
                wrong += 1
                print(f"WRONG {dtype} {case}: {error}", flush=True)
        worst[f"worst_share_{dtype_name(dtype)}"] = max(shares, default=None)
        print(f"{dtype}: {len(shares)} of {len(cases)} cases are right", flush=True)
    return {"cases": len(cases) * len(TOLERANCE), "cases_wrong": wrong, **worst}


def draws_of(draws: int, target: Target) -> dict[str, float | None]:
    """The same of random calls."""
    tally = fuzz(["native"], range(draws), target.dtype)["native"]
    print(f"{draws} random calls", *(words for _, words in tally.failures), sep="\n", flush=True)
    worst = max(tally.shares.values(), default=None)
    return {"draws": draws, "draws_wrong": len(tally.failures), "worst_share_draws": worst}


def attacks_of(draws: int, target: Target) -> dict[str, float | None]:
    """The same of attacks on the certificate: the mass that was dropped as a share of the tolerance."""
    attacks = [random_attack(seed, bf16=target.dtype == "bfloat16") for seed in range(draws)]
    lost = [dropped(attack, native_keys)[0] / attack.tolerance for attack in attacks]
    return {
        "attacks": draws,
        "attacks_broken": sum(not share <= 1 for share in lost),
        "worst_share_attacks": max(lost, default=None),
    }


def _config(target: Target, draws: int) -> dict[str, object]:
    told = subprocess.run([str(runner(target)), "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "draws": draws,
        "instructions": target.words,
        "run_by": told.splitlines()[0],
        "ziglang": metadata.version("ziglang"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 500))
