"""The certificate of tables by distance: what `native` leaves out of a call whose table needs no gradient, in fp64."""

import dataclasses
import math
import random

import pytest
import torch
from certificate_attack import keys_of
from torch import Tensor

from alibi_attn import alibi_slopes, toeplitz_attention
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate.constants import KEY_RULE_TOKENS, TILE

Spec = AttentionSpec[Tensor]
KINDS = ("root", "log", "linear", "steps", "cliff", "flat", "increasing", "waves", "noise", "lowest", "far island")


def entries(kind: str, distance: Tensor, rng: random.Random) -> Tensor:
    """One head's bias at these distances, which start at 0."""
    m, far = 2.0 ** rng.uniform(-3, 2), distance > rng.choice([5, 63, 64, 100])
    return {
        "root": -m * distance.sqrt(),
        "log": -8 * m * distance.log1p(),
        "linear": -m * distance,
        "steps": -m * (distance / 16).floor(),
        "cliff": torch.where(far, -40.0 * m, 0.0),
        "flat": torch.full_like(distance, m),
        "increasing": m * distance.sqrt(),
        "waves": -m * distance.sqrt() + 20 * m * (distance / 29).sin(),
        "noise": torch.randn(len(distance), dtype=distance.dtype) * 4 - m * distance,
        "lowest": torch.where(far, torch.finfo(torch.float32).min, -m * distance),
        "far island": torch.where(distance == distance.max() - 3, 2.0, -m * distance),
    }[kind]


def draw(seed: int) -> tuple[Spec, Tensor, Tensor, Tensor]:
    rng, h = random.Random(seed), 2
    torch.manual_seed(seed)
    t, s = (rng.choice([1, 64, 65, 150, 257, 300]) for _ in range(2))
    s, causal = t if rng.random() < 0.6 else s, rng.random() < 0.6
    options: dict = {"causal": causal, "tolerance": 10 ** rng.uniform(-6, -1)}
    if rng.random() < 0.2:
        options["query_offset"] = rng.choice([0, 5, s, s + 40, -30])
    if rng.random() < 0.2:
        options["window"] = rng.choice([7, 64, 100])
    if rng.random() < 0.2:
        options["key_mask"] = torch.rand(1, s) < rng.choice([0.3, 0.9])
    if rng.random() < 0.2:
        ids = torch.randint(0, 3, (1, t)).sort(-1)[0], torch.randint(0, 3, (1, s)).sort(-1)[0]
        options["segment_ids"] = ids
    q, k, v = (torch.randn(1, heads, n, 8, dtype=torch.float64) for heads, n in ((h, t), (1, s), (1, s)))
    q, k = q * 10 ** rng.uniform(-1.5, 0.3), k * 10 ** rng.uniform(-1.5, 0.3)
    if rng.random() < 0.3:
        k[:, :, rng.randrange(s)] *= 20
    if rng.random() < 0.2:
        v[:, :, rng.randrange(s)] *= 100
    dtype = rng.choice([torch.float32, torch.float64])
    q, k, v = (x.to(dtype) for x in (q, k, v))
    spec = make_spec(q, k, v, [0.0] * h, **options)
    n = max(t + abs(int(spec.query_offset)), s + abs(int(spec.query_offset)))
    away = torch.arange(n, dtype=torch.float64)
    sides = [torch.stack([entries(rng.choice(KINDS), away, rng) for _ in range(h)]) for _ in range(2)]
    table = sides[0] if causal else torch.cat([sides[1].flip(1)[:, :-1], sides[0]], 1)
    return dataclasses.replace(spec, table=table.to(dtype)), q, k, v


def shares_of(spec: Spec, q: Tensor, k: Tensor) -> Tensor:
    """[H, T, S]: the softmax written out."""
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    assert spec.table is not None
    columns = (distance[0] - spec.table_first).clamp(0, spec.table.shape[1] - 1)
    scores = spec.scale * q[0].double() @ k[0].double().mT + spec.table[:, columns]
    return scores.masked_fill(~visible(spec, distance)[0], -math.inf).softmax(-1).nan_to_num(0.0)


def nearest(spec: Spec) -> Tensor:
    """[T, S]: the distance of the tile's nearest key to the block's nearest query, or less."""
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)[0]
    return (distance.abs() - 2 * (TILE - 1)).clamp(min=0)


def check(seed: int) -> bool:
    """Raises AssertionError unless all shares obey their limits; whether the draw leaves out a key."""
    spec, q, k, v = draw(seed)
    shares = shares_of(spec, q, k)
    of_forward = shares * ~keys_of(native.visited(spec, q, k, v, for_backward=False), spec)[0]
    assert of_forward.sum(-1).max() <= spec.tolerance, seed
    by_rule = shares * ~keys_of(native.visited(spec, q, k, v).for_backward, spec)[0]
    assert (by_rule * 2 * (nearest(spec) + KEY_RULE_TOKENS)).max() <= spec.tolerance * 1.001, seed
    assert by_rule.sum(-1).max() <= spec.tolerance, seed
    assert by_rule.sum(-2).max() <= spec.tolerance * (1 + math.log(-(-spec.query_len // TILE))), seed
    return bool(of_forward.any())


def test_what_is_left_out_weighs_at_most_the_tolerance_and_obeys_the_key_rule() -> None:
    skipping = sum(check(seed) for seed in range(100))  # 2,000 have passed
    assert skipping >= 20, f"an attack on nothing: {skipping} draws leave out a key"


def test_thirty_times_the_tolerance_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(spec: Spec, *tensors: Tensor, **options: bool) -> Visited:
        return visited(dataclasses.replace(spec, tolerance=min(0.9, 30 * spec.tolerance)), *tensors, **options)

    visited, found = native.visited, 0
    monkeypatch.setattr(native, "visited", careless)
    for seed in range(40):
        try:
            check(seed)
        except AssertionError:
            found += 1
    assert found >= 5


def root_alibi(tokens: int = 1500, **options: object) -> tuple[dict, dict]:
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=numbers) for _ in range(3))
    table = -torch.tensor(alibi_slopes(16)[:2], dtype=torch.float32)[:, None] * torch.arange(tokens) ** 0.5
    return {"query": q, "key": k, "value": v, "table": 3 * table}, {"backend": "native"} | options


def scores_of(given: dict[str, Tensor], **options: object) -> float:
    """The share of the causal scores that native computes."""
    q, k, v, table = given.values()
    spec = dataclasses.replace(make_spec(q, k, v, [0.0] * 2, **options), table=table)  # type: ignore[arg-type]
    found = native.visits(spec, q, k, v)
    return float(found.scores.sum()) / (q.shape[1] * q.shape[2] * (q.shape[2] + 1) / 2)


def test_a_table_without_gradient_skips_far_keys_and_one_with_a_gradient_reads_all() -> None:
    given, options = root_alibi()
    assert scores_of(given) < 0.6
    assert scores_of(given, tolerance=0.0) > 1  # whole blocks
    exact, skipping = (toeplitz_attention(**given, **options, tolerance=tolerance) for tolerance in (0.0, None))
    assert not torch.equal(skipping, exact)
    torch.testing.assert_close(skipping, exact, rtol=0, atol=1e-6)
    given["table"].requires_grad_()
    assert torch.equal(toeplitz_attention(**given, **options), exact)
    with torch.no_grad():
        assert torch.equal(toeplitz_attention(**given, **options), skipping)


def test_skipping_changes_gradients_by_rounding_only() -> None:
    given, options = root_alibi()
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    found = []
    for tolerance in (None, 0.0):
        output, lse = toeplitz_attention(**given, **options, tolerance=tolerance, return_lse=True)
        found.append(torch.autograd.grad(output.square().sum() + lse.sin().sum(), leaves))
    for one, full in zip(*found, strict=True):
        torch.testing.assert_close(one, full, rtol=1e-5, atol=2e-6)


def test_a_last_bucket_without_an_end_is_summed_over_the_distances_that_occur() -> None:
    """As T5's: from distance 128 on all keys have the same bias, so what remains grows with the length."""
    given, _ = root_alibi(640)
    given["table"] = torch.where(torch.arange(640) < 128, 0.0, -60.0).expand(2, 640)
    assert scores_of(given) < 0.6
    given["table"] = torch.where(torch.arange(640) < 128, 0.0, -20.0).expand(2, 640)
    assert scores_of(given) > 1
