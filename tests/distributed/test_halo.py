"""Halos: the rows left out weigh no more than the tolerance, summed in fp64, and few rows are sent."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from halo_checks import assert_certified, assert_reaches_are_certified, largest_share_beyond_reach, scores

from alibi_attn.attention.call.validation import make_spec
from alibi_attn.distributed import plan_halo, static_halo
from alibi_attn.distributed.halo_bounds import RankSummary, Shard, halo_from_requests, rank_summary, requested_rows
from alibi_attn.distributed.halos import even_lengths, published_halo
from alibi_attn.nn import ALiBiAttention
from alibi_attn.slopes import alibi_slopes

LENGTHS = (350, 325, 15, 0, 210)
TOTAL = sum(LENGTHS)
SLOPES = [1.0, 0.5, 0.24, 0.12]


def drawn(*, kv_heads=4, dim=16, batch=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 4, TOTAL, dim), *[(batch, kv_heads, TOTAL, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def test_a_halo_that_is_too_narrow_is_noticed():
    tensors = drawn()
    halo = plan_halo(*tensors, SLOPES, lengths=LENGTHS, tolerance=2.0**-28)
    narrow = dataclasses.replace(halo, left=tuple(tuple(n // 2 for n in heads) for heads in halo.left))
    with pytest.raises(AssertionError, match="is left out"):
        assert_certified(narrow, *tensors, SLOPES)


def test_few_queries_are_within_reach_of_the_halo_and_a_shorter_reach_is_noticed():
    query, key, value = drawn()
    requests = assert_reaches_are_certified(query, key, value, SLOPES, LENGTHS)
    of_heads = [numbers[2] for numbers in requests[1]]
    assert of_heads == sorted(of_heads)
    assert of_heads[0] < 40
    assert of_heads[3] < 325
    shorter = [[[left, right, reach // 2, *rest] for left, right, reach, *rest in request] for request in requests]
    spec = make_spec(query, key, value, SLOPES, tolerance=2.0**-28)
    assert largest_share_beyond_reach(shorter, LENGTHS, scores(query, key, SLOPES, spec=spec), spec) > 2.0**-28


def test_outlier_keys_of_the_first_rank_cost_their_tiles_and_no_band():
    query, key, value = drawn()
    plain = plan_halo(query, key, value, SLOPES, lengths=LENGTHS, tolerance=2.0**-28)
    key[:, :, 3] *= 12
    halo = plan_halo(query, key, value, SLOPES, lengths=LENGTHS, tolerance=2.0**-28)
    assert_certified(halo, query, key, value, SLOPES)
    flattest = 3
    assert halo.outliers[2][flattest] == ((0, 64),)
    assert halo.outliers[1][0] == ()  # still too far away for a steep head
    assert halo.left[2][flattest] < plain.left[2][flattest] + 100


def test_longer_values_far_away_widen_the_halo():
    query, key, value = drawn()
    plain = plan_halo(query, key, value, SLOPES, lengths=LENGTHS)
    value[:, 1, 5] *= 1e4
    halo = plan_halo(query, key, value, SLOPES, lengths=LENGTHS)
    assert halo.left[1][1] > plain.left[1][1]
    assert halo.left[1][0] == plain.left[1][0]


def test_without_tolerance_or_slope_all_visible_rows_are_requested():
    tensors = drawn()
    halo = plan_halo(*tensors, SLOPES, lengths=LENGTHS, tolerance=0.0)
    assert halo.rows[4].sum(0).tolist() == [690] * 4
    assert plan_halo(*tensors, SLOPES, lengths=LENGTHS, tolerance=0.0, window=11).left[4] == (10,) * 4
    flat = plan_halo(*tensors, [1.0, 0.0, -0.1, 0.12], lengths=LENGTHS)
    assert flat.left[2][1:3] == (675, 675)
    assert flat.left[2][0] < 200
    bias = torch.zeros(TOTAL)
    assert plan_halo(*tensors, SLOPES, lengths=LENGTHS, tolerance=0.0, key_bias=bias).left[4] == (690,) * 4


def test_rows_that_are_not_finite_are_never_left_out():
    query, key, value = drawn()
    key[0, 2, 40, 3] = math.nan
    assert plan_halo(query, key, value, SLOPES, lengths=LENGTHS).spans(1, 2)[0] == (0, 350) or (
        plan_halo(query, key, value, SLOPES, lengths=LENGTHS).outliers[1][2] == ((0, 64),)
    )
    query, key, value = drawn()
    query[0, 2, 360] = math.inf
    assert plan_halo(query, key, value, SLOPES, lengths=LENGTHS).left[1][2] == 350


def test_segments_that_do_not_cross_a_border_need_nothing():
    tensors = drawn()
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS)).expand(2, -1)
    assert plan_halo(*tensors, SLOPES, lengths=LENGTHS, segment_ids=ids).received_bytes == 0
    ids = ids.clone()
    ids[1, 340:350] = 1  # ten rows of rank 0 belong to the text of rank 1
    halo = plan_halo(*tensors, SLOPES, lengths=LENGTHS, segment_ids=ids)
    assert halo.rows[1, 0].min() > 0
    assert halo.rows[2:].sum() == 0


def test_published_slopes_at_131072_tokens_receive_a_twentieth_of_an_all_gather():
    """With 8 key heads, for a score bound of 5, and for noise with head_dim 64."""
    halo = published_halo(131_072, 8)
    assert halo.rows[1:].sum() * 20 < halo.all_gather_rows[1:].sum()
    assert halo.rows[4].sum() / 8 == pytest.approx(2185, abs=1)
    # For noise the rows next to a border decide: later ones need less.
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 8, rows, 64, generator=generator) for rows in (128, 2048, 2048))
    spec = make_spec(query, query, query)
    whole = dataclasses.replace(spec, query_len=2048, key_len=2048)
    summary, lengths = RankSummary.of(spec, torch.stack([rank_summary(whole, key, value)] * 8)), (16_384,) * 8
    near = query, key[:, :, :128], value[:, :, :128]
    needs = [requested_rows(Shard(spec, rank, lengths, summary, *near)).tolist() for rank in range(8)]
    noise = halo_from_requests(needs, lengths, 8)
    assert noise.rows[4].sum() > 8000
    assert noise.rows.sum() * 20 < noise.all_gather_rows.sum()


def test_a_static_halo_is_the_static_reach_of_the_layer():
    layer = ALiBiAttention(64, 8, num_kv_heads=4, qk_norm=True, window=300)
    reach = layer.static_reach()
    halo = static_halo(
        (1000, 50, 1000),
        layer.slopes.values.tolist(),
        score_bound=layer.score_bound(),
        num_kv_heads=4,
        head_dim=8,
        window=300,
    )
    widest = reach.unflatten(0, (4, 2)).amax(1) - 1
    assert halo.left[1] == tuple(widest.tolist())
    assert halo.left[2] == tuple(widest.clamp(max=1050).tolist())
    assert halo.rows[2, 1].tolist() == widest.clamp(max=50).tolist()  # the rest comes from the rank before
    assert halo.rows[2, 0].tolist() == (widest - 50).clamp(min=0).tolist()


def test_a_static_halo_covers_the_halo_of_any_tensors_within_the_bound():
    query, key, value = drawn(kv_heads=2)
    bound = float((query.norm(dim=-1).amax() * key.norm(dim=-1).amax()) / 4) * 1.01
    static = static_halo(
        LENGTHS, SLOPES, score_bound=bound, num_kv_heads=2, head_dim=16, batch=2, causal=False, tolerance=2.0**-28
    )
    halo = plan_halo(query, key, value, SLOPES, lengths=LENGTHS, causal=False, tolerance=2.0**-28)
    assert (np.array(static.left) >= np.array(halo.left)).all()
    assert (np.array(static.right) >= np.array(halo.right)).all()
    assert static.row_bytes == halo.row_bytes == 2 * 2 * 16 * 4
    assert_certified(static, query, key, value, SLOPES, causal=False)


def test_pieces_add_up_to_the_rows():
    halo = plan_halo(*drawn(), SLOPES, lengths=LENGTHS, causal=False)
    counted = np.zeros_like(halo.rows)
    for rank in range(5):
        for owner in range(5):
            for head, _, (low, high) in halo.pieces(rank, owner):
                assert 0 <= low < high <= LENGTHS[owner]
                counted[rank, owner, head] += high - low
    assert (counted == halo.rows).all()
    assert halo.rows[:, 3].sum() == halo.rows[3].sum() == 0
    assert halo.received_bytes == halo.rows.sum() * 2 * 2 * 16 * 4
    widest = halo.widest()
    assert (widest.rows[..., 0] == halo.rows.max(-1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [10, -1]}, "number of rows of each rank"),
        ({"score_bound": math.inf}, "score_bound is inf"),
        ({"num_kv_heads": 3}, "must divide"),
        ({"dtype": "int8"}, "must be one of"),
        ({"right_slopes": [1.0]}, "never sees"),
        ({"causal": False, "right_slopes": [1.0]}, "1 entries but slopes 8"),
        ({"tolerance": 1.0}, "share of softmax mass"),
    ],
)
def test_invalid_arguments_of_a_static_halo_raise(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        static_halo(**({"lengths": [10, 10], "slopes": alibi_slopes(8), "score_bound": 1.0} | change))


def test_lengths_must_add_up():
    with pytest.raises(ValueError, match="must add up to the 900 queries"):
        plan_halo(*drawn(), SLOPES, lengths=[500, 300])
    assert even_lengths(131, 8) == (17, 17, 17, 16, 16, 16, 16, 16)


def test_python_numbers_too_large_for_a_tensor():
    wide = plan_halo(*drawn(), SLOPES, lengths=LENGTHS, tolerance=0.0, window=10**30)
    assert wide == plan_halo(*drawn(), SLOPES, lengths=LENGTHS, tolerance=0.0)
    assert static_halo(LENGTHS, SLOPES, score_bound=2.0, window=10**30) == static_halo(LENGTHS, SLOPES, score_bound=2.0)
    with pytest.raises(ValueError, match="must be finite"):
        plan_halo(*drawn(), SLOPES, lengths=LENGTHS, scale=10**400)
