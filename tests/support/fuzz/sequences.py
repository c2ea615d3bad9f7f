"""Draws sequences of steps and checks them, for the drivers that attack caches."""

import random
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

Step = tuple[str, int]  # an action, and a number from which its details follow


def run(check: Callable[..., dict[str, int]], kinds: Iterable[str], actions: Sequence[str]) -> None:
    """Checks as many random sequences as the command line says, 300 by default, and prints the call that fails.

    Args:
        check: called as `check(kind, steps, near=...)`; returns how often each action was done.
    """
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    rng, names, total = random.Random(count), list(kinds), dict.fromkeys(actions, 0)
    for number in range(count):
        kind, steps, near = rng.choice(names), drawn(rng, actions), rng.random() < 0.5
        try:
            for action, times in check(kind, steps, near=near).items():
                total[action] += times
        except BaseException:
            print(f"sequence {number} fails: check({kind!r}, {steps}, near={near})")
            raise
    print(f"{count} sequences agree: {total}")


def drawn(rng: random.Random, actions: Sequence[str]) -> list[Step]:
    """One to 13 steps."""
    return [(rng.choice(actions), rng.randrange(1000)) for _ in range(rng.randrange(1, 14))]
