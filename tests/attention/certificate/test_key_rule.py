"""The key rule: what a query leaves out at a key is so little that all queries together leave out little of any key."""

import math

import pytest
import torch
from certificate_attack import certified_keys, random_attack
from halo_checks import scores
from key_losses import (
    LENGTH,
    SLOPE,
    TOLERANCE,
    assert_keys_keep_their_weight,
    gates,
    growing_queries,
    largest_loss,
    lost_weight,
)

from alibi_attn import certified_block_mask
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances
from alibi_attn.attention.certificate.bounds import bounds, reach_of_nats
from alibi_attn.attention.certificate.key_rule import largest_share, obeys_key_rule, reach_by_key_rule
from alibi_attn.distributed import plan_halo
from alibi_attn.reach import UNLIMITED

DISTANCE = distances(LENGTH, LENGTH, 0, None)


def test_the_limit_at_a_key_is_typed_from_the_rule() -> None:
    assert largest_share(torch.tensor([0.0, 936.0]), 1e-3).tolist() == pytest.approx([1e-3 / 128, 1e-3 / 2000])


def test_from_the_reach_on_every_distance_obeys_the_rule_and_the_one_before_does_not() -> None:
    """Compared with all distances, one by one. Where the bound falls slowly, short distances may obey too, until it rises."""
    generator = torch.Generator().manual_seed(0)
    m = torch.exp2(torch.empty(100, dtype=torch.float64).uniform_(-7, 3, generator=generator))
    nats = torch.empty(100, dtype=torch.float64).uniform_(-25, 30, generator=generator)
    tolerance, far = 1e-4, torch.arange(2**14, dtype=torch.float64)
    found = reach_by_key_rule(nats, m, tolerance)
    everywhere = 0
    for one, slope, reach in zip(nats, m, found.tolist(), strict=True):
        obeys = one - slope * far + torch.log(2 * (far + 64)) <= math.log(tolerance)
        least = int((~obeys).nonzero().max()) + 1 if not obeys.all() else 0
        everywhere += least == 0
        assert least == 0 or least - 1 < reach
        assert reach <= least + 0.1 * (least + 64), (one, slope)
    assert 5 < everywhere < 95


@pytest.mark.parametrize("slope", [2.0**-30, 2.0**-8, 1.0, 1e30])
@pytest.mark.parametrize("nats", [-math.inf, -1e5, 0.0, 1e5, 1e300, math.inf, math.nan])
def test_extreme_numbers_certify_nothing_that_is_not_true(slope: float, nats: float) -> None:
    query = torch.zeros(1, 1, 1, 1)
    spec = make_spec(query, query, query, tolerance=1e-6)
    each, m = torch.tensor([nats], dtype=torch.float64), torch.tensor([slope], dtype=torch.float64)
    reach = reach_of_nats(spec, each, each - math.inf, m, for_gradients=True)
    assert reach == UNLIMITED or obeys_key_rule(each - m * reach, reach.double(), 1e-6)
    assert reach < 10**9 or not nats < 1e5 or slope < 1e-6


def kept_by(found, spec) -> torch.Tensor:
    return certified_keys(spec, found, distances(spec.query_len, spec.key_len, spec.query_offset, None))


@pytest.mark.parametrize("refine", [False, True])
def test_a_key_that_all_queries_may_leave_out_keeps_its_weight(refine: bool) -> None:
    """A limit per query alone lets key 0 lose many times what the rule allows."""
    query, key, value = growing_queries(0.2 * TOLERANCE)
    spec = make_spec(query, key, value, [SLOPE], scale=1.0, tolerance=TOLERANCE)
    score = scores(query, key, [SLOPE], spec=spec)
    of_queries, of_keys = (
        kept_by(bounds(spec, query, key, value, refine=refine, for_gradients=x), spec) for x in (False, True)
    )
    assert float(lost_weight(of_queries, score).max()) > 3 * largest_loss(TOLERANCE, LENGTH)
    assert_keys_keep_their_weight(of_keys, score, DISTANCE, TOLERANCE)
    assert float((~of_keys & (DISTANCE >= 0)).sum()) > 10_000, "nothing is left out: the test sees nothing"
    with pytest.raises(AssertionError, match="times what the rule allows"):
        assert_keys_keep_their_weight(of_queries, score, DISTANCE, TOLERANCE)


def test_attacks_obey_the_rule_in_every_pair() -> None:
    skipping = 0
    for seed in range(60):
        attack = random_attack(seed)
        (query, key, value, slopes), kwargs = attack.inputs()
        if attack.log_giant > 3 or attack.log_query > 1 or attack.log_key > 1 or "offset" in attack.mask:
            continue  # shares of these are rounded in the computed truth
        spec = make_spec(query, key, value, slopes, **kwargs)
        found = bounds(spec, query, key, value, refine=attack.refine)
        distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
        kept = certified_keys(spec, found, distance)
        skipping += bool((~kept & (distance >= 0)).any())
        assert_keys_keep_their_weight(kept, scores(query, key, slopes, spec=spec), distance, attack.tolerance)
    assert skipping > 8


@pytest.mark.parametrize("gated", [False, True])
def test_a_block_mask_leaves_every_key_its_weight(gated: bool) -> None:
    query, key, _ = growing_queries(0.1 * TOLERANCE)
    options = {"key_bias": gates()} if gated else {}
    slopes = [0.0 if gated else SLOPE]
    mask = certified_block_mask(query, key, slopes, scale=1.0, tolerance=TOLERANCE, block_size=64, **options)
    kept = mask.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
    spec = make_spec(query, key, key, slopes, scale=1.0, tolerance=TOLERANCE, **options)
    assert_keys_keep_their_weight(kept, scores(query, key, slopes, spec=spec), DISTANCE, TOLERANCE)


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_other_ranks_that_are_not_sent_keep_their_weight(gated: bool) -> None:
    """With gradients; a rank requests fewer rows without."""
    query, key, value = growing_queries(0.1 * TOLERANCE / (20 if gated else 1), block=1)
    options = {"key_bias": gates()} if gated else {}
    slopes, lengths = [0.0 if gated else SLOPE], [700, 64, 900, LENGTH - 1664]
    spec = make_spec(query, key, value, slopes, scale=1.0, tolerance=TOLERANCE, **options)
    score = scores(query, key, slopes, spec=spec)
    kept = []
    for x in (query, query.clone().requires_grad_()):
        halo = plan_halo(x, key, value, slopes, lengths=lengths, scale=1.0, tolerance=TOLERANCE, **options)
        sent = torch.zeros_like(score, dtype=torch.bool)
        for rank, start in enumerate(halo.offsets):
            rows = slice(start, start + lengths[rank])
            for low, high in [(start, rows.stop), *halo.spans(rank, 0)]:
                sent[..., rows, low:high] = True
        kept.append(sent)
    assert float(lost_weight(kept[0], score).max()) > (1 if gated else 10) * largest_loss(TOLERANCE, LENGTH)
    assert bool((kept[1] >= kept[0]).all())
    assert not torch.equal(kept[1], kept[0])
    assert_keys_keep_their_weight(kept[1], score, DISTANCE, TOLERANCE)
