"""What backward of the Triton kernels leaves out because forward measured it; runs in the process with the interpreter."""

import dataclasses
import math

import pytest
import torch
from attention_cases import Case
from certificate_attack import random_attack
from fused_in_interpreter import call_of
from measured_attack import fused_keys, left_out_by_backward
from measured_in_interpreter import visited

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible

pytestmark = pytest.mark.usefixtures("interpreter")

PEAKED = Case("peaked", batch=1, heads=2, query_len=600, key_len=600, slopes="random", peaked=3.0)
CASES = (
    PEAKED,
    dataclasses.replace(PEAKED, name="both sides", causal=False),
    dataclasses.replace(PEAKED, name="sink", sink=60.0),
    dataclasses.replace(PEAKED, name="grouped, window", heads=4, kv_heads=2, window=400, query_len=330, offset=200),
    dataclasses.replace(PEAKED, name="masked, both sides", causal=False, mask="random", query_len=450, key_len=450),
    dataclasses.replace(PEAKED, name="padded", mask="left", batch=2, query_len=300, key_len=300),
)


def assert_gradient_over_measured_tiles(case: Case, tolerance: float) -> list[int]:
    """Gradients are fp64 sums over exactly the pairs that each kernel should visit.

    Returns how many pairs forward visits, the query kernel, and the key kernel.
    """
    spec, query, key, value = call_of(case, tolerance=tolerance)
    seen = visible(spec, distances(spec.query_len, spec.key_len, spec.query_offset, None))
    ours, of_queries, of_keys = (x & seen for x in visited(spec, query, key, value))
    drawn = case.draw()
    do, dlse = torch.tensor(drawn["grad_output"]), torch.tensor(drawn["grad_lse"])
    blind = ~seen.expand(ours.shape).any(-1, keepdim=True)
    query, do, dlse = query.masked_fill(blind, 0.0), do.masked_fill(blind, 0.0), dlse.masked_fill(blind[..., 0], 0.0)
    q, m = query.double(), spec.slopes.double().reshape(-1, 1, 1)
    k, v = (x.double().repeat_interleave(spec.group, 1) for x in (key, value))
    distance = (torch.arange(spec.query_len)[:, None] + spec.query_offset - torch.arange(spec.key_len)).abs()
    p = (spec.scale * (q @ k.mT) - m * distance).masked_fill(~ours, -torch.inf).softmax(-1).nan_to_num()
    ds = p * (do @ v.mT - ((p @ v) * do).sum(-1, keepdim=True) + dlse[..., None])
    of_heads = spec.scale * (ds * of_keys).mT @ q, (p * of_keys).mT @ do
    true = [spec.scale * (ds * of_queries) @ k, *(x.unflatten(1, (-1, spec.group)).sum(2) for x in of_heads)]
    true.append(-(ds * of_queries * distance).sum((0, 2, 3)))
    tiles = fused.plan(spec, query, key, value)
    output, lse = fused.forward(spec, query, key, value, tiles)
    found = fused.backward(spec, query, key, value, output, lse, do.float(), dlse.float(), tiles, slopes_wanted=True)
    for name, x, y in zip(("query", "key", "value", "slopes"), (*found[:3], found[3].sum((0, 1))), true, strict=True):
        assert float((x - y).abs().max() / y.abs().max()) < 2e-5, name
    return [int(x.sum()) for x in (ours, of_queries, of_keys)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_visits_exactly_the_measured_tiles(case: Case) -> None:
    forward, queries, keys = assert_gradient_over_measured_tiles(case, 0.2)
    assert queries <= keys < 0.9 * forward, "nothing is left out"


def test_peaked_queries_need_far_fewer_keys_than_certified() -> None:
    forward, queries, keys = assert_gradient_over_measured_tiles(PEAKED, 1e-6)
    assert max(queries, keys) < 0.7 * forward


def computed(tolerance: float, *, trains: bool = True) -> tuple[int, int]:
    """How many scores forward and backward compute, as `explain` counts them."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 700, 16, requires_grad=trains)
    peaked = 3.0 * query
    with torch.no_grad():
        found = fused.visits(make_spec(peaked, key, value, [0.1, 0.05], tolerance=tolerance), peaked, key, value)
    measured = found.scores if found.measured_scores is None else found.measured_scores
    return int(found.scores.sum()), int(measured.sum())


def test_a_tolerance_of_zero_leaves_out_nothing() -> None:
    assert assert_gradient_over_measured_tiles(PEAKED, 0.0) == [2 * 600 * 601 // 2] * 3
    every, of_backward = computed(0.0)
    assert every == of_backward


def test_the_scores_of_backward_are_counted() -> None:
    every, of_backward = computed(1e-5)
    assert 0 < of_backward < 0.8 * every
    assert every < computed(1e-5, trains=False)[0] == computed(0.0)[0], "short calls without gradients read all keys"


def test_a_call_through_autograd_uses_what_forward_measured() -> None:
    query, key, value, do = torch.randn(4, 1, 2, 500, 16)
    leaves = [x.requires_grad_() for x in (3.0 * query, key, value)]
    output = alibi_attention(*leaves, [0.1, 0.05], tolerance=0.2, backend="fused")
    found = torch.autograd.grad(output, leaves, do)
    with torch.no_grad():
        spec = make_spec(*leaves, [0.1, 0.05], tolerance=0.2)
        tiles = fused.plan(spec, *leaves)
        output, lse = fused.forward(spec, *leaves, tiles)
        expected = fused.backward(spec, *leaves, output, lse, do, None, tiles, slopes_wanted=False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected[:3], strict=True))


@pytest.mark.parametrize(("biased", "careless", "draws"), [(False, 1.0, 40), (True, 1.0, 40), (False, 1e5, 20)])
def test_what_backward_leaves_out_weighs_at_most_the_tolerance(biased: bool, careless: float, draws: int) -> None:
    """With a hundred thousand times the tolerance it weighs more."""
    shares, skipping = [0.0], 0
    for seed in range(draws):
        attack = random_attack(seed, biased=biased)
        attack = dataclasses.replace(attack, length=attack.length * (4 if seed % 10 == 0 else 1))
        lost, share, off = left_out_by_backward(attack, careless * attack.tolerance, fused_keys)
        if off < 0.5:
            shares.append(lost / (attack.tolerance * math.exp(2 * off)))
            skipping += share > 0
    assert (max(shares) <= 1) == (careless == 1.0)
    assert skipping >= 5, "an attack on nothing: too few draws leave out a key"


def test_a_long_value_shrinks_the_allowance() -> None:
    """One that no query needs, a thousand times as long as others: of the first tiles that backward visits none comes later."""
    query, key, value = torch.randn(3, 1, 2, 700, 16)
    found = []
    for factor in (1.0, 1e3):
        value[:, :, 5] *= factor
        spec = make_spec(query, key, value, [0.1, 0.02], tolerance=1e-3)
        tiles = fused.plan(spec, query, key, value)
        fused.forward(spec, query, key, value, tiles)
        found.append(tiles.measured[0, :, :11, 0].clone())
    assert bool((found[1] <= found[0]).all())
    assert bool((found[1] < found[0]).any())
