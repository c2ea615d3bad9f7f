"""Attacks on the certificate, and how many keys it skips."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from certificate_attack import Attack, certified_keys, dropped, random_attack, read_keys

from alibi_attn import alibi_attention, head_reach
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.banded import pieces as banded_pieces
from alibi_attn.attention.backends.banded import visited as banded_visited
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate import bounds, constants, lse_bound
from alibi_attn.reach import UNLIMITED, reach


def lost_by_definition(attack: Attack, kept: np.ndarray) -> float:
    """The largest share of softmax mass on keys that are not in `kept` [H, T, S], query by query in numpy."""
    (query, key, _, slopes), options = attack.inputs()
    q, k, m = (x.double().numpy() for x in (query[0], key[0, 0], slopes))
    right = m if options["right_slopes"] is None else np.float32(options["right_slopes"])
    mask, segments, window = (options[name] for name in ("key_mask", "segment_ids", "window"))
    first = options["query_offset"] if options["query_offset"] is not None else len(k) - q.shape[1]
    worst = 0.0
    for h, t in np.ndindex(q.shape[:2]):
        distance = first + t - np.arange(len(k))
        seen = distance >= 0 if attack.causal else np.full(len(k), True)
        seen &= True if window is None else abs(distance) < window
        seen &= True if mask is None else mask[0].numpy()
        seen &= True if segments is None else (segments[0] == segments[0, first + t]).numpy()
        if not seen.any():
            continue
        scores = k @ q[h, t] / attack.head_dim**0.5 - np.where(distance < 0, right[h], m[h]) * abs(distance)
        weight = np.exp(scores - scores[seen].max(), where=seen, out=np.zeros(len(k)))
        worst = max(worst, float(weight[~kept[h, t]].sum() / weight.sum()))
    return worst


def test_the_lost_mass_of_an_attack_equals_its_definition() -> None:
    """A third of the keys is dropped at random, so that every draw loses something."""
    for seed in range(0, 200, 5):
        attack = dataclasses.replace(random_attack(seed), length=1 + seed // 3, refine=False)
        shape = attack.group, attack.inputs()[0][0].shape[2], attack.length
        kept = np.random.default_rng(seed).random(shape) < 0.67
        lost, _ = dropped(attack, lambda *_, kept=kept: torch.from_numpy(kept)[None])  # type: ignore[misc]
        assert lost == pytest.approx(lost_by_definition(attack, kept), rel=1e-6, abs=1e-300), attack


class Equal(Attack):
    """All keys are equal, every query is parallel to them, and all numbers lie just below a rounding point of bf16."""

    def inputs(self) -> tuple[list[torch.Tensor], dict]:
        (query, key, value, slopes), kwargs = super().inputs()
        return [torch.full_like(query, 10.035), torch.full_like(key, 10.035), value, slopes], kwargs


def test_products_in_reduced_precision_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be set to multiply fp32 in TF32 or bf16; without a term for that the tolerance would be exceeded."""
    honest = bounds.lower_bound

    def reduced(spec, query, key, first, **options):  # type: ignore[no-untyped-def]
        return honest(spec, query.bfloat16().float(), key.bfloat16().float(), first, **options)

    monkeypatch.setattr(bounds, "lower_bound", reduced)
    equal = Equal(length=300, slope=0.2)
    lost, share = dropped(equal)
    assert lost <= equal.tolerance
    assert share > 0
    for attack in map(random_attack, range(100)):
        if attack.dtype != "float64":
            assert dropped(attack)[0] <= attack.tolerance, attack
    monkeypatch.setattr(constants, "REDUCED_PRODUCTS", 0.0)
    assert dropped(equal)[0] > equal.tolerance


@pytest.mark.parametrize("seed", range(60))
def test_the_plan_reads_every_certified_key_once_and_no_pair_twice(seed: int) -> None:
    attack = dataclasses.replace(random_attack(seed), dtype="float32")
    (query, key, value, slopes), kwargs = attack.inputs()
    spec = make_spec(query, key, value, slopes, **kwargs)
    found = bounds.bounds(spec, query, key, value)
    read = read_keys(spec, banded_pieces.plan(spec, found, threads=2))
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    asked = visible(spec, distance) & certified_keys(spec, found, distance)
    assert int(read.max()) <= 1
    assert bool((read[asked.expand_as(read)] == 1).all())


@pytest.mark.parametrize(
    ("query_len", "key_len", "threads"), [(2048, 2048, 1), (1025, 2100, 2), (1500, 2600, 3), (1999, 3001, 2)]
)
def test_a_plan_of_squares_reads_every_certified_key_once(
    monkeypatch: pytest.MonkeyPatch, query_len: int, key_len: int, threads: int
) -> None:
    """Long bands are split into squares, also at both ends of a band and at key 0."""
    monkeypatch.setattr(banded_pieces, "SQUARES", ((1200, 512), (600, 256)))
    monkeypatch.setattr(banded_pieces, "ROWS", 64)
    monkeypatch.setattr(banded_pieces, "MAX_KEYS", 700)
    torch.manual_seed(query_len)
    query, key = torch.randn(1, 6, query_len, 8), torch.randn(1, 6, key_len, 8)
    query[:, 1, 700:1400] *= 3  # a reach that changes within the head
    key[:, 2, 40] *= 6  # an outlier
    spec = make_spec(query, key, key, [0.15, 0.04, 0.04, 0.02, 0.01, 0.0])
    found = bounds.bounds(spec, query, key, key)
    plan = banded_pieces.plan(spec, found, threads=threads)
    read = read_keys(spec, plan)
    distance = distances(query_len, key_len, spec.query_offset, None)
    seen = visible(spec, distance)
    asked = seen & certified_keys(spec, found, distance)
    assert int(read.max()) == 1
    assert bool((read[asked.expand_as(read)] == 1).all())
    assert sum(p.scores for heads in plan for pieces in heads for p in pieces) < 1.4 * int(asked.sum())
    left = [p for pieces in plan[0] for p in pieces if p.kind == "left"]
    assert any(p.stride > p.rows for p in left), "no squares: the test sees nothing"
    assert any(p.rows >= 256 for p in left)
    for h, pieces in enumerate(plan[0]):
        reach = banded_visited.farthest(spec, pieces, key_len - query_len)
        assert reach >= int((distance[0] * (read[0, h] > 0)).max()) + 1
        assert sum(p.count * p.rows for p in pieces if not p.merge) == query_len


@pytest.mark.parametrize("at", [100, 3000, 7900])
def test_one_giant_query_widens_no_band_but_its_own(at: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 3, 8192, 16), torch.randn(1, 3, 8192, 16)
    slopes = [0.1, 0.04, 0.015]
    spec = make_spec(query, key, key, slopes)
    calm = [
        sum(p.scores for p in pieces)
        for pieces in banded_pieces.plan(spec, bounds.bounds(spec, query, key, key), threads=2)[0]
    ]
    query[:, :, at] *= 1000
    found = bounds.bounds(spec, query, key, key)
    assert bool((found.left[0, :, at // 64] > 8192).all())
    giant = [sum(p.scores for p in pieces) for pieces in banded_pieces.plan(spec, found, threads=2)[0]]
    for few, more in zip(calm, giant, strict=True):
        assert more <= 1.05 * few + 1024 * 8192


def test_refined_bounds_are_tighter_and_never_wider() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, 8192, 64) for _ in range(3))
    spec = make_spec(query, key, value)
    plain, refined = (
        bounds.bounds(spec, query, key, value, refine=refine, for_gradients=False).left.double()
        for refine in (False, True)
    )
    assert bool((refined <= plain).all())
    shares = (refined.mean(-1) / plain.mean(-1))[0]
    assert float(shares[-1]) < 0.9  # the flattest head reads a tenth less
    found = bounds.bounds(spec, query, key, value, for_gradients=False).left
    assert torch.equal(found.double(), refined)  # long inputs refine


def test_lower_bounds_stay_below_the_log_sum_exp() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 640, 16), torch.randn(1, 2, 700, 16) * 2
    spec = make_spec(query, key, key, [0.5, 0.05, 0.005, 0.0005], query_offset=60, tolerance=0.9)
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    scores = spec.scale * query.double() @ key.double().repeat_interleave(2, 1).mT
    scores = scores - spec.slopes.double()[:, None, None] * distance.abs()
    exact = scores.masked_fill(~visible(spec, distance), -math.inf).logsumexp(-1)
    first = bounds.first_positions(spec, query.device)
    near, more = (lse_bound.lower_bound(spec, query, key, first, stretches=far) for far in (False, True))
    assert bool((near <= more).all())
    assert bool((more <= exact + 1e-4).all())
    assert float((more - near)[0, -1, 400:].mean()) > 1.0
    # At a tolerance that no reach within 700 keys satisfies, λ is not refined.
    hopeless = dataclasses.replace(spec, tolerance=1e-9)
    some = lse_bound.lower_bound(hopeless, query, key, first, stretches=True)
    assert torch.equal(some[:, 2:], torch.full_like(some[:, 2:], -math.inf))
    assert torch.equal(some[:, :2], more[:, :2])
    assert int(bounds.bounds(hopeless, query, key, key).left[:, 2:].min()) > 700


def test_a_far_giant_key_is_always_seen() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, 1024, 16) for _ in range(3))
    key[:, :, 5] = 200 * query[:, :, -1]
    spec = make_spec(query, key, value)
    _, plans = banded.plan(spec, query, key, value)
    read = read_keys(spec, plans)
    assert bool((read[0, :, -1, 5] == 1).all())


def test_one_giant_key_costs_a_few_tiles_and_not_the_band() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, 4096, 32) for _ in range(3))
    spec = make_spec(query, key, value)
    calm = banded.visits(spec, query, key, value)[1]
    key[:, :, 0] *= 30
    with_sink = banded.visits(spec, query, key, value)[1]
    steep = slice(0, 5)
    extra = (with_sink - calm)[0, steep]
    assert bool((extra <= 4096 * 2 * bounds.TILE).all()), extra
    none = torch.zeros(1, 8, dtype=torch.bool)
    without = bounds.bounds(spec, query, key, value, outliers=none).left
    with_outliers = bounds.bounds(spec, query, key, value).left
    assert bool((with_outliers[0, steep].amax(-1) * 4 < without[0, steep].amax(-1)).all())


def test_masked_giants_and_other_batch_rows_change_nothing() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 700, 8) for _ in range(3))
    mask = torch.rand(2, 700) < 0.9
    plain = bounds.bounds(make_spec(query, key, value, key_mask=mask), query, key, value)
    giant = torch.where(mask[:, None, :, None], key, key * 1e6)
    hidden = bounds.bounds(make_spec(query, giant, value, key_mask=mask), query, giant, value)
    alone = bounds.bounds(make_spec(query[:1], key[:1], value[:1], key_mask=mask[:1]), query[:1], key[:1], value[:1])
    for name in ("left", "right", "outlier_tiles"):
        assert torch.equal(getattr(plain, name), getattr(hidden, name))
        assert torch.equal(getattr(plain, name)[:1], getattr(alone, name))


def test_outliers_of_another_sequence_or_head_change_nothing() -> None:
    """The first keys are 2.9 times longer than the rest: an outlier tile would pay, but `banded` requires 3 times the mean."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 3000, 16) for _ in range(3))
    query, key = 12 * torch.nn.functional.normalize(query, dim=-1), 2 * torch.nn.functional.normalize(key, dim=-1)
    key[:, :, 0] *= 2.9
    giant = key.clone()
    giant[:, :, 0] *= 50
    other_head = torch.stack([key[:, 0], giant[:, 0]], 1)
    alone, in_batch, next_to_giant = (
        banded.plan(make_spec(q, k, v, [0.05, 0.05]), q, k, v)[0]
        for q, k, v in (
            (query, key, value),
            [torch.cat(pair) for pair in ((query, query), (key, giant), (value, value))],
            (query, other_head, value),
        )
    )
    for name in ("left", "right", "outlier_tiles"):
        assert torch.equal(getattr(in_batch, name)[:1], getattr(alone, name))
        assert torch.equal(getattr(next_to_giant, name)[:, 0], getattr(alone, name)[:, 0])
    assert bool((in_batch.outlier_tiles[1] >= 0).any(-1).all())


@pytest.mark.parametrize("backend", ["banded", "native"])
def test_nan_in_another_sequence_changes_no_reach(backend: str) -> None:
    """Key 100 is before every window, so no query sees it; its norm still bounds the reach, as without the other sequence."""
    query, key = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 3000, 16)
    key[:, :, 100] *= 1e4
    spoiled = key.clone()
    spoiled[:, :, 2900] = math.nan
    alone = head_reach(query, key, [0.05, 0.5], window=2000, backend=backend)
    both = head_reach(torch.cat([query, query]), torch.cat([key, spoiled]), [0.05, 0.5], window=2000, backend=backend)
    assert torch.equal(both[:1], alone)


def test_tensors_and_plain_numbers_agree() -> None:
    """One query, one key: U, λ and the reach by hand."""
    query, key = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[0.6, 0.8]]]])
    spec = make_spec(query, key, key, [0.25], tolerance=1e-6, scale=1.0)
    found = int(bounds.bounds(spec, query, key, key, for_gradients=False).left)
    by_hand = reach(0.25, 5.0, 5.0, 1e-6)
    assert found in (by_hand, by_hand + 1)
    # The key rule: exp(U − λ − m·r)·2·(r + 64) ≤ ε.
    wider = int(bounds.bounds(spec, query, key, key).left)
    excess = [math.exp(-0.25 * r) * 2 * (r + 64) / 1e-6 for r in (wider - 1, wider, wider + 1)]
    assert excess[1] <= 1.0 < excess[0] * math.exp(0.25)
    assert excess[2] < excess[1]


@pytest.mark.parametrize("slope", [0.0, -0.5])
def test_slopes_that_do_not_fall_have_no_reach(slope: float) -> None:
    query = torch.randn(1, 1, 300, 4)
    found = bounds.bounds(make_spec(query, query, query, [slope]), query, query, query)
    assert bool((found.left == UNLIMITED).all())


def test_tolerance_zero_skips_nothing() -> None:
    query = torch.randn(1, 2, 300, 4)
    spec = make_spec(query, query, query, [4.0, 2.0], tolerance=0.0)
    scores = banded.visits(spec, query, query, query).scores
    assert bool((scores >= 300 * 301 // 2).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-300, -45, -30, -20, 0, 18, 25, 38, 200, 300])
def test_a_norm_bound_is_never_short(power: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and not -45 <= power <= 38:
        return  # fp32 holds 1e-45 to 3e38
    vectors = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1e-8, 3.0]], dtype=torch.float64)
    vectors = (vectors * 10.0**power).to(dtype)
    bound = bounds.norm_bound(vectors)
    for row, got in zip(vectors.tolist(), bound.tolist(), strict=True):
        true = math.hypot(*row)
        assert got >= true
        assert got <= true * 1.0001 + 1e-18 or got == math.inf


@pytest.mark.parametrize("far", [1.0, 1e-9])
def test_dropped_keys_move_the_gradient_of_a_query_within_its_bound(far: float) -> None:
    """Steps 6 and 12 of the certificate: also if dropped keys are tiny, because the weights of the kept ones change too."""
    n, d, slope, most = 512, 16, 0.02, 0.2
    draws = torch.randn(4, 1, 1, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value, grad = draws
    key[:, :, :-128] *= far
    query.requires_grad_()
    gradients, lses = [], []
    for tolerance in (most, 0.0):
        output, lse = alibi_attention(query, key, value, [slope], tolerance=tolerance, return_lse=True)
        gradients += torch.autograd.grad((output * grad).sum(), query)
        lses.append(lse.detach())
    share = -torch.expm1(lses[0] - lses[1])
    assert share.max() > 0.001
    norms = key.norm(dim=-1).cummax(dim=-1).values * value.norm(dim=-1).max() / math.sqrt(d)
    error = (gradients[0] - gradients[1]).norm(dim=-1)
    bound = (6 * share + 2 * most) * grad.norm(dim=-1) * norms  # backward leaves out as much again
    assert (error <= bound + 1e-12).all()
    # The norms of the dropped keys alone would not do.
    assert far == 1.0 or (error > far * bound).any()
