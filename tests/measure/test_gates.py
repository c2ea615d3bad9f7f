"""`alibi bench gates`: its counts equal their definitions, a wrong peer raises, and its records are complete."""

import functools
import math
from pathlib import Path

import pytest
import torch

from alibi_lab import records
from alibi_lab.measure import gates as bench

draw = functools.partial(bench.draw, 2.0, 8.0)


def test_scores_stay_below_their_bound() -> None:
    inputs = draw(300)
    scores = inputs.query @ inputs.key.mT / math.sqrt(bench.HEAD_DIM)
    assert 4 < float(scores.max()) <= 8.001
    assert bool((inputs.log_fgate < 0).all())


def test_acps_boundary_equals_its_rule_tile_by_tile() -> None:
    inputs = draw(700)
    query, key, log_fgate = inputs.query, inputs.key, inputs.log_fgate
    sums, count = log_fgate[0].double().cumsum(-1), 0
    for h in range(bench.HEADS):
        largest = float(query[0, h].double().norm(dim=-1).max() * key[0, h].double().norm(dim=-1).max()) / 8
        delta = -(2 * largest + math.log(700)) + math.log(1e-3)
        for first in range(0, 700, 64):
            rows = min(64, 700 - first)
            for tile in range(0, first + rows, 64):
                last = min(tile + 64, 700) - 1
                if tile == first or float(sums[h, first] - sums[h, last]) >= delta:
                    count += rows * (last + 1 - tile)
    assert bench.pruned_scores(log_fgate, query, key, 1e-3) == count


def test_ours_computes_fewer_scores_than_acp_at_equal_tolerance() -> None:
    inputs = draw(2048)
    ours = bench.computed_scores(inputs, 1e-3)
    assert ours < 0.9 * bench.pruned_scores(inputs.log_fgate, inputs.query, inputs.key, 1e-3)


def test_there_is_one_record_per_kind(tmp_path: Path) -> None:
    messages: list[str] = []
    paths = bench.gates(tmp_path, lengths=(128, 256), logits=(2.0,), bounds=(8.0,), repeats=1, say=messages.append)
    (record,) = [records.load(path) for path in paths]
    assert (record.name, len(messages)) == ("gates/logit-2-U-8", 2 * 5 + 1)
    assert record.curves["ours"]["length"] == [128, 256]
    assert record.curves["scores"]["visible"] == [8 * n * (n + 1) // 2 for n in (128, 256)]
    assert all(error < 1e-5 for error in record.curves["ours"]["relative_error"])
    assert 0 < record.metrics["scores as a share of ACP's"] <= 1
    with pytest.raises(FileExistsError):
        bench.gates(tmp_path, lengths=(128, 256), logits=(2.0,), bounds=(8.0,), repeats=1)


def test_a_wrong_peer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.forgetting_attention

    def wrong(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        return right(query, *rest, **options) * (1.0 if query.dtype == torch.float64 else 1.001)

    monkeypatch.setattr(bench, "forgetting_attention", wrong)
    with pytest.raises(RuntimeError, match="ours is wrong at 128 tokens"):
        bench.measured(draw(128), repeats=1, seconds=1.0)
