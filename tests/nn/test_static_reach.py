"""The static reach of a QK-normalized layer: certified before any input exists, for the worst possible input."""

import math

import pytest
import torch
from refusals import assert_refused

from alibi_attn import ALiBiAttention
from alibi_attn.reach import UNLIMITED


def layer_with(weight: float, **options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    layer = ALiBiAttention(32, 4, **{"qk_norm": True, **options}).eval()
    with torch.no_grad():
        layer.q_norm.weight.normal_().mul_(weight / layer.q_norm.weight.abs().max())
        layer.k_norm.weight.normal_().mul_(weight / layer.k_norm.weight.abs().max())
    return layer


def worst_share(bound: float, slope: float, distance: int) -> float:
    """Largest possible softmax share of all keys at |i − j| ≥ distance, in fp64.

    The query's own key has the lowest score, all far keys the highest, and no other key is near.
    """
    far = bound - slope * torch.arange(distance, distance + math.ceil(60 / slope), dtype=torch.float64)
    return float(torch.cat([torch.tensor([-bound], dtype=torch.float64), far]).softmax(0)[1:].sum())


@pytest.mark.parametrize("weight", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("tolerance", [1e-3, 2.0**-28])
def test_the_worst_scores_there_can_be_leave_the_tolerance(weight, tolerance):
    layer = layer_with(weight)
    bound, reach = layer.score_bound(), layer.static_reach(tolerance=tolerance)
    for slope, distance in zip(layer.slopes.values.tolist(), reach.tolist(), strict=True):
        assert worst_share(bound, slope, distance) <= tolerance
        assert worst_share(bound, slope, distance - 2) > tolerance  # and the reach is not too large


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_no_input_scores_beyond_the_bound(dtype):
    layer = layer_with(1.0).to(dtype)
    seen = 0.0
    for size in (1e-3, 1.0, 100.0):
        x = (torch.randn(4, 50, 32) * size).to(dtype)
        query, key = layer.q_norm(layer._heads(layer.q_proj(x))), layer.k_norm(layer._heads(layer.k_proj(x)))
        seen = max(seen, float((query.double() @ key.double().mT).abs().max()) / math.sqrt(layer.head_dim))
    # With equal weights every query comes near the bound against a key equal to it.
    layer.q_norm.weight.fill_(1.0)
    layer.k_norm.weight.fill_(1.0)
    one = layer.q_norm(torch.randn(5000, layer.head_dim, dtype=dtype)).double()
    largest = float(one.square().sum(-1).max()) / math.sqrt(layer.head_dim)
    assert 0.98 * layer.score_bound() < largest <= layer.score_bound()


def test_reach_follows_slopes_window_and_direction():
    reach = layer_with(1.0).static_reach()
    assert reach.dtype == torch.int64
    assert reach.shape == (4,)
    assert layer_with(1.0, window=50).static_reach().tolist() == reach.clamp(max=50).tolist()
    assert (layer_with(1.0, causal=False).static_reach() > reach).all()
    without = layer_with(1.0, slopes=[0.0, -0.5, 0.25, 1.0]).static_reach().tolist()
    assert without[:2] == [UNLIMITED] * 2
    assert without[2] > without[3]
    assert layer_with(1.0).static_reach(tolerance=0.0).tolist() == [UNLIMITED] * 4
    assert (layer_with(1.0).bfloat16().static_reach() < reach).all()  # a coarser dtype forgets sooner


def test_errors_say_why_there_is_no_static_reach():
    plain, layer = ALiBiAttention(32, 4), layer_with(1.0)
    assert layer.static_reach(key_mask=torch.ones(1, 3, dtype=torch.bool)).shape == (4,)
    assert_refused(
        ("create the layer with qk_norm=True, or pass reach_cache .* score_bound=", plain.static_reach),
        ("own key is hidden has no static", lambda: layer.static_reach(key_mask=torch.tensor([[True, False]]))),
        (r"tolerance is 1.5 but is a share", lambda: layer.static_reach(tolerance=1.5)),
        (r"score_bound is -2.0 but bounds \|q·k\|/√D", lambda: layer.static_reach(score_bound=-2.0)),
    )
