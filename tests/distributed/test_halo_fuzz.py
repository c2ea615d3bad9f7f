"""Random calls, split into random shards: the rows that a halo leaves out, or a reach, weigh no more than the tolerance."""

import math
import random

import pytest
import torch
from halo_checks import assert_certified, assert_reaches_are_certified

from alibi_attn.distributed import plan_halo


def drawn(seed: int) -> tuple[list[torch.Tensor], list[float], list[int], dict]:
    """(query, key and value, slopes, lengths, options)"""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [choose.choice([0, 1, 3, 40, 64, 65, 130, 200]) for _ in range(choose.choice([2, 3, 4]))]
    lengths[0] += not any(lengths)
    total, heads, batch, dim = sum(lengths), choose.choice([1, 2, 4]), choose.choice([1, 2]), choose.choice([1, 4, 16])
    kv_heads = choose.choice([k for k in (1, 2, 4) if heads % k == 0])

    def normal(*shape, scales=(0.1, 1.0, 1.0, 4.0)):
        return torch.randn(shape, generator=generator) * choose.choice(scales)

    tensors = [normal(batch, heads, total, dim), *(normal(batch, kv_heads, total, dim) for _ in range(2))]
    for _ in range(choose.choice([0, 0, 1, 3, 7])):
        tensors[1][choose.randrange(batch), choose.randrange(kv_heads), choose.randrange(total)] *= choose.choice(
            [0.01, 5, 20]
        )
    if choose.random() < 0.2:
        tensors[2][0, 0, choose.randrange(total)] *= 1e3
    dtype = choose.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    slopes = [choose.choice([2.0, 1.0, 0.5, 0.25, 0.1, 0.03, 0.03]) for _ in range(heads)]
    slopes[0] = choose.choice([slopes[0]] * 9 + [-0.01])
    options: dict = {"tolerance": choose.choice([1e-2, 1e-4, 2.0**-28])}
    if choose.random() < 0.4:
        options["causal"] = False
        if choose.random() < 0.5:
            options["right_slopes"] = [choose.choice([1.0, 0.3, 0.1, math.inf]) for _ in range(heads)]
    if choose.random() < 0.3:
        options["window"] = choose.choice([1, 2, 3, 5, 33, 100])
    if choose.random() < 0.4:
        mask = torch.rand(batch, total, generator=generator) < choose.choice([0.95, 0.5, 0.1, 1.0])
        mask[choose.randrange(batch), choose.randrange(total) :] = False
        options["key_mask"] = mask
    if choose.random() < 0.3:
        options["segment_ids"] = (torch.arange(total) // choose.choice([7, 50, 150])).expand(batch, -1)
    if choose.random() < 0.35:
        bias = normal(batch, heads, total, scales=(0.5, 5.0))
        bias = choose.choice([bias, bias.abs().cumsum(-1), bias.abs().cumsum(-1) * -0.1])
        bias[..., choose.randrange(total)] = choose.choice([-math.inf, 0.0, 50.0])
        options["key_bias"] = bias
    if choose.random() < 0.2:
        options["scale"] = choose.choice([-0.5, 0.7, 0.0])
    return [x.to(dtype) for x in tensors], slopes, lengths, options


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.long)])
def test_no_draw_leaves_out_more_than_the_tolerance(seeds):
    for seed in seeds:
        tensors, slopes, lengths, options = drawn(seed)
        print(f"seed {seed}")  # pytest shows the last one
        assert_certified(plan_halo(*tensors, slopes, lengths=lengths, **options), *tensors, slopes, **options)
        assert_reaches_are_certified(*tensors, slopes, lengths, **options)
