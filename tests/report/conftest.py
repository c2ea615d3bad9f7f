"""Made-up records, computed from formulas, so that the expected numbers are known; contrast of colors."""

import math
from collections.abc import Callable, Sequence

import pytest

from alibi_lab import records
from alibi_lab.records import Record

LENGTHS = [128, 256, 512, 1024, 2048]
# Nats at the trained length, and what every doubling beyond it adds.
MADE_UP = {
    "none": (2.15, 0.05),
    "sinusoidal": (2.22, 0.16),
    "learned": (2.20, 0.0),
    "rotary": (1.87, 0.30),
    "t5": (1.93, 0.07),
    "alibi": (2.00, -0.012),
}


def made_up_nats(method: str, length: int, trained: int, seed: int) -> float | None:
    start, growth = MADE_UP[method]
    if method == "learned" and length > trained:
        return None
    return start + 0.01 * seed + growth * max(0.0, math.log2(length / trained))


@pytest.fixture(scope="session")
def made_up() -> Callable[..., list[Record]]:
    """Builds trainings and evaluations: `made_up(methods=..., trained=(128,), seeds=1)`."""

    def build(
        *,
        methods: Sequence[str] = ("sinusoidal", "rotary", "t5", "alibi"),
        trained: Sequence[int] = (128,),
        seeds: int = 1,
        bytes_per_token: float = 1,
    ) -> list[Record]:
        return [
            record
            for method in methods
            for length in trained
            for seed in range(seeds)
            for record in _pair(method, length, seed, bytes_per_token)
        ]

    return build


@pytest.fixture(scope="session")
def contrast() -> Callable[[Sequence[int], Sequence[int]], float]:
    """The contrast ratio of WCAG 2.1 for two colors; each is red, green and blue from 0 to 255."""

    def luminance(color: Sequence[int]) -> float:
        channels = [part / 255 for part in color]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def ratio(one: Sequence[int], other: Sequence[int]) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    return ratio


def _pair(method: str, trained: int, seed: int, bytes_per_token: float) -> list[Record]:
    name = f"quick/{method}-{trained}/seed-{seed}"
    corpus = {"name": "made-up", "sha256": "ab" * 32, "train_tokens": 1000, "bytes_per_token": bytes_per_token}
    config = {
        "model": {"method": method, "num_heads": 4},
        "data": {"corpus": "made-up", "text": []},
        "train": {"length": trained, "steps": 40, "seed": seed},
    }
    nats = [made_up_nats(method, length, trained, seed) for length in LENGTHS]
    positions = [2**power for power in range(12)]
    by_length = {
        "length": LENGTHS,
        "nonoverlapping_nats": nats,
        "sliding_nats": [None if value is None else value - 0.05 for value in nats],
        "tokens_per_second": [
            None if value is None else 5e7 / (900 + n) for value, n in zip(nats, LENGTHS, strict=True)
        ],
        "peak_memory_bytes": [
            None if value is None else 5e8 + 40 * n * n for value, n in zip(nats, LENGTHS, strict=True)
        ],
    }
    by_position = {
        "position": positions,
        "loss_nats": [
            None if (value := made_up_nats(method, position, trained, seed)) is None else value + 3 / position
            for position in positions
        ],
    }
    steps = [10, 20, 30, 40]
    training = {"step": steps, "loss_nats": [nats[0] + 60 / step for step in steps]}
    metrics = {"loss_nats": nats[0], "parameters": 800_000, "tokens_per_second": 2e4, "seconds": 40.0, "tokens": 8e5}
    return [
        records.make(
            "training", name, config={**config, "corpus": corpus}, metrics=metrics, curves={"training": training}
        ),
        records.make(
            "evaluation",
            name,
            config={**config, "eval": {"lengths": LENGTHS, "stride": None}, "corpus": corpus},
            metrics={"parameters": 800_000},
            curves={"by_length": by_length, "by_position": by_position},
        ),
    ]
