"""Random calls, split into random shards: the rows that a halo leaves out, or a reach, weigh no more than the tolerance."""

import dataclasses
import random

import pytest
from differential_arrays import arrays
from differential_calls import Call, draw, settled
from differential_checks import arguments
from halo_checks import assert_certified, assert_reaches_are_certified

from alibi_attn.distributed import plan_halo

# What shards do not have, and numbers whose softmax fp64 rounds.
PLAIN = (
    "offset",
    "offset_as",
    "gates",
    "sinks",
    "bad",
    "dropout_p",
    "slopes_as",
    *(f"size_{x}" for x in ("query", "key", "value")),
)
MILD = {"outlier_value": 1e3, "peaked": 4.0}
OPTIONS = ("causal", "right_slopes", "window", "scale", "key_mask", "segment_ids", "key_bias")


def drawn(seed: int) -> tuple[list, list[int], dict]:
    """(query, key, value and slopes, lengths of the shards, options) of a call over these rows."""
    choose, call = random.Random(seed), draw(seed)
    lengths = [choose.choice([0, 1, 3, 40, 64, 65, 130, 200]) for _ in range(choose.choice([2, 3, 4]))]
    lengths[0] += not any(lengths)
    changes = {name: getattr(Call, name) for name in PLAIN} | {
        x: min(getattr(call, x), most) for x, most in MILD.items()
    }
    changes |= {"batch": max(call.batch, 1), "outlier_key": choose.choice([1.0, 5.0, 20.0]), "segments_as": "one"}
    call = settled(dataclasses.replace(call, query_len=sum(lengths), key_len=sum(lengths), **changes))
    given = arguments(call, arrays(call))
    options = {name: given[name] for name in OPTIONS} | {"tolerance": call.share}
    return [given[name] for name in ("query", "key", "value", "slopes")], lengths, options


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.long)])
def test_no_draw_leaves_out_more_than_the_tolerance(seeds):
    for seed in seeds:
        tensors, lengths, options = drawn(seed)
        print(f"seed {seed}")  # pytest shows the last one
        assert_certified(plan_halo(*tensors, lengths=lengths, **options), *tensors, **options)
        assert_reaches_are_certified(*tensors, lengths, **options)
