"""Appending to a static cache on a device: one kernel, which writes what torch operations write; runs in the interpreter."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import append as on_device
from alibi_attn.attention.run import decoding
from alibi_attn.nn import ALiBiAttention, KVCache

pytestmark = pytest.mark.usefixtures("interpreter")

# Numbers of tokens to append, or a length to crop to in a tuple.
STEPS: dict[str, tuple[list[int | tuple[int]], dict[str, Any]]] = {
    "across tiles, and cropped": (
        [1, 1, 62, 1, 1, (63,), 1, 130, 5, (0,), 3, 64, 65, (100,), 40],
        {"capacity": 300, "batch": 2, "heads": 2},
    ),
    "padded rows, heads of two sizes": (
        [5, 59, 1, 66, 2],
        {"capacity": 200, "heads": 3, "sizes": (24, 40), "dtype": torch.float16},
    ),
    "too many tokens, some of which fit": ([60, 5, 1, 1, 3], {"capacity": 66}),
    "too many tokens": ([64, 3, 1], {"capacity": 64, "heads": 2}),
}


def never(*_: object) -> bool:
    return False


OFF_CPU = mock.patch.object(decoding, "_on_cpu", never)
BY_TORCH = mock.patch.object(on_device, "appends", never)


@OFF_CPU
@pytest.mark.parametrize("name", STEPS)
def test_rows_lengths_and_norms_are_those_of_torch(name: str) -> None:
    """Norms may be larger by a few units, never smaller."""
    steps, given = STEPS[name]
    capacity, batch, heads = given["capacity"], given.get("batch", 1), given.get("heads", 1)
    dtype = given.get("dtype", torch.float32)
    by_kernel, by_torch = KVCache(capacity=capacity), KVCache(capacity=capacity)
    for step in steps:
        if isinstance(step, tuple):
            by_kernel.crop(*step), by_torch.crop(*step)
            continue
        drawn = (torch.randn(batch, step, heads, d) for d in given.get("sizes", (16, 16)))
        new = [(x * torch.rand(batch, step, heads, 1)).to(dtype).transpose(1, 2) for x in drawn]
        with mock.patch.object(on_device, "append", wraps=on_device.append) as append:
            [found] = by_kernel.append(*new)
        assert append.call_count == 1
        with BY_TORCH:
            [expected] = by_torch.append(*new)
        assert len(by_kernel) == len(by_torch)
        assert int(found.first) == int(expected.first)
        of_kernel, of_torch = by_kernel.fixed.norms, by_torch.fixed.norms
        torch.testing.assert_close(found.key, expected.key, rtol=0, atol=0, equal_nan=True)
        if len(by_kernel) > capacity:  # the keys are NaN, whatever the values are
            assert bool(of_kernel.keys[..., -1].isinf().all())
            continue
        torch.testing.assert_close(found.value, expected.value, rtol=0, atol=0)
        for own, other in ((of_kernel.keys, of_torch.keys), (of_kernel.values, of_torch.values)):
            assert bool((own >= other).all())
            assert bool((own <= other * (1 + 2.0**-14) + 2.0**-56).all())


@torch.no_grad()
def reach_decodes(steps: list[int], *, capacity: int) -> tuple[Tensor, Tensor, int]:
    """(a layer's outputs for steps through a cache of a fixed reach, 0 begins anew; those of one pass; launches of the kernel).

    Raises an AssertionError unless the cache holds what torch operations write. The last head needs more than any capacity here.
    """
    layer = ALiBiAttention(64, 4, num_kv_heads=4, qk_norm=True, slopes=[4.0, 3.0, 1.5, 0.001]).eval()
    x, outputs, launches, at, fits = torch.randn(2, sum(steps), 64), [], 0, 0, True
    by_kernel, by_torch = (layer.reach_cache(score_bound=4.0, tolerance=1e-6, capacity=capacity) for _ in range(2))
    for step in steps:
        if step == 0:
            by_kernel.crop(0), by_torch.crop(0)
            continue
        part, at = x[:, at : at + step], at + step
        with mock.patch.object(on_device, "append_to_rings", wraps=on_device.append_to_rings) as append:
            outputs.append(layer(part, cache=by_kernel))
        launches += append.call_count
        with BY_TORCH:
            layer(part, cache=by_torch)
        assert len(by_kernel) == len(by_torch)
        fits = fits and len(by_kernel) <= capacity
        for pairs in zip(by_kernel.fixed.tensors, by_torch.fixed.tensors, strict=True):
            assert not fits or all(torch.equal(own, other) for own, other in zip(*pairs, strict=True))
    return torch.cat(outputs, 1), layer(x), launches


@OFF_CPU
def test_one_kernel_writes_the_rings_of_all_heads() -> None:
    """Rings of 8 and 15 tokens are overwritten, also by chunks, which torch operations write."""
    steps = [3, *[1] * 6, 9, *[1] * 4]
    found, whole, launches = reach_decodes(steps, capacity=40)
    assert launches == steps.count(1)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


@OFF_CPU
def test_rings_that_are_too_short_give_nan_until_a_new_text() -> None:
    found, whole, _ = reach_decodes([6, 1, 1, 1, 1, 0, 4, 1], capacity=8)
    torch.testing.assert_close(found[:, :8], whole[:, :8], atol=1e-5, rtol=1e-5)
    assert found[:, 8:10].isnan().all()
    assert found[:, 10:].isfinite().all()
