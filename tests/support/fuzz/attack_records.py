"""Runs an attack on a certificate for many seeds, and saves a record; for the programs of this folder."""

import collections
import datetime
from collections.abc import Callable
from pathlib import Path

import torch

from alibi_lab import records

# The share of the limit that was lost, the share of skipped keys, the draw's kinds.
Found = tuple[float, float, tuple[str, ...]]


def attack_all(
    name: str,
    draws: int,
    out: Path,
    attack: Callable[[int], Found | None],
    *,
    limit: str = "tolerance",
    **config: object,
) -> None:
    """Runs the attacks of `draws` seeds and saves a record; None is a draw whose scores are rounded, which proves nothing."""
    torch.set_num_threads(1)
    started, worst, shares = datetime.datetime.now(datetime.UTC), 0.0, 0.0
    counts: dict[str, collections.Counter[str]] = {x: collections.Counter() for x in ("draws", "skipping", "broken")}
    for seed in range(draws):
        if (found := attack(seed)) is not None:
            lost, share, kinds = found
            worst, shares = max(worst, lost), shares + share
            for count, holds in (("draws", True), ("skipping", share > 0), ("broken", not lost <= 1)):
                counts[count].update(("all", *kinds) if holds else ())
        if seed % 5000 == 4999:
            said = f"{counts['skipping']['all']} that skip, worst {worst:.3g} of the {limit}, {counts['broken']['all']} broken"
            print(f"{seed + 1} draws, {said}", flush=True)
    drawn = sorted(counts["draws"])
    record = records.make(
        "certificate",
        name,
        config={"draws": draws, "first_seed": 0, **config},
        metrics={
            "broken": counts["broken"]["all"],
            "draws_that_skip": counts["skipping"]["all"],
            "draws_with_rounded_scores": draws - counts["draws"]["all"],
            f"worst_share_of_{limit}": worst,
            "mean_skipped_share": shares / draws,
        },
        curves={"kinds": {"kind": drawn} | {name: [of[kind] for kind in drawn] for name, of in counts.items()}},
        started=started,
    )
    print(records.save(record, out))
