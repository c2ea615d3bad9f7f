"""The conformance suite, random calls and attacks on the kernels of another system, run by qemu or Wine."""

from attention_cases import CASES, KEY_BIASES
from attention_checks import answer, assert_exact
from certificate_attack import dropped, native_keys, random_attack
from differential_fuzz import fuzz
from emulated_kernels import TOLERANCE, Target

WRONG = "cases_wrong", "draws_wrong", "attacks_broken"


def cases_of() -> dict[str, int]:
    """Numbers of cases in all dtypes."""
    cases, wrong = (*CASES, *KEY_BIASES), 0
    for dtype, tolerance in TOLERANCE.items():
        for case in cases:
            try:
                assert_exact(case, dtype, answer(case, dtype, backend="native"), tolerance=tolerance)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG {dtype} {case}: {error}", flush=True)
    return {"cases": len(cases) * len(TOLERANCE), "cases_wrong": wrong}


def draws_of(draws: int, target: Target) -> dict[str, int]:
    """The same of random calls."""
    failures = fuzz(["native"], range(draws), target.dtype)["native"].failures
    print(*(words for _, words in failures), sep="\n", flush=True)
    return {"draws_wrong": len(failures)}


def attacks_of(draws: int, target: Target) -> dict[str, int]:
    """The same of attacks on the certificate."""
    attacks = [random_attack(seed, bf16=target.dtype == "bfloat16") for seed in range(draws)]
    return {"attacks_broken": sum(not dropped(attack, native_keys)[0] <= attack.tolerance for attack in attacks)}
