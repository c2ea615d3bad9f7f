"""Runs the kernel that appends to a static cache in Triton's interpreter, next to torch operations; `fused_in_interpreter.py`."""

from unittest import mock

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import append as on_device
from alibi_attn.attention.kept import Kept
from alibi_attn.attention.run import decoding
from alibi_attn.nn import ALiBiAttention, KVCache


def appends_as_torch_does(
    steps: list[int | tuple[int]],
    *,
    capacity: int,
    batch: int = 1,
    heads: int = 1,
    sizes: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> int:
    """At each step appends the given number of tokens, or crops to a length in a tuple; returns the number of launches.

    Raises an AssertionError unless rows and lengths are those that torch operations give, and norms at least those.
    """
    generator, launches = torch.Generator().manual_seed(0), 0
    caches = by_kernel, by_torch = KVCache(capacity=capacity), KVCache(capacity=capacity)
    with mock.patch.object(decoding, "_on_cpu", return_value=False):
        for step in steps:
            if isinstance(step, tuple):
                for cache in caches:
                    cache.crop(*step)
                continue
            shape = batch, step, heads
            key, value = (
                (torch.randn(*shape, d, generator=generator) * torch.rand(*shape, 1, generator=generator)).to(dtype)
                for d in sizes
            )
            new = key.transpose(1, 2), value.transpose(1, 2)
            with mock.patch.object(on_device, "append", wraps=on_device.append) as append:
                [found] = by_kernel.append(*new)
            launches += append.call_count
            with mock.patch.object(on_device, "appends", return_value=False):
                [expected] = by_torch.append(*new)
            _compare(by_kernel, by_torch, found, expected)
    return launches


@torch.no_grad()
def reach_decodes(steps: list[int], *, capacity: int, slopes: list[float]) -> tuple[Tensor, Tensor, int]:
    """(a layer's outputs for steps through a cache of a fixed reach, 0 begins anew; those of one pass; launches of the kernel).

    Raises an AssertionError unless the cache holds what torch operations write.
    """
    torch.manual_seed(0)
    layer, x = ALiBiAttention(64, 4, num_kv_heads=4, qk_norm=True, slopes=slopes).eval(), torch.randn(2, sum(steps), 64)
    outputs, launches, at, fits = [], 0, 0, True
    by_kernel, by_torch = (layer.reach_cache(score_bound=4.0, tolerance=1e-6, capacity=capacity) for _ in range(2))
    with mock.patch.object(decoding, "_on_cpu", return_value=False):
        for step in steps:
            if step == 0:
                by_kernel.crop(0), by_torch.crop(0)
                continue
            part, at = x[:, at : at + step], at + step
            with mock.patch.object(on_device, "append_to_rings", wraps=on_device.append_to_rings) as append:
                outputs.append(layer(part, cache=by_kernel))
            launches += append.call_count
            with mock.patch.object(on_device, "appends", return_value=False):
                layer(part, cache=by_torch)
            assert len(by_kernel) == len(by_torch)
            fits = fits and len(by_kernel) <= capacity
            for pairs in zip(by_kernel.fixed.tensors, by_torch.fixed.tensors, strict=True):
                for own, other in zip(*pairs, strict=True):
                    assert not fits or torch.equal(own, other)
    return torch.cat(outputs, 1), layer(x), launches


def _compare(by_kernel: KVCache, by_torch: KVCache, found: Kept, expected: Kept) -> None:
    assert len(by_kernel) == len(by_torch)
    assert int(found.first) == int(expected.first)
    of_kernel, of_torch = by_kernel.fixed.norms, by_torch.fixed.norms
    torch.testing.assert_close(found.key, expected.key, rtol=0, atol=0, equal_nan=True)
    if len(by_kernel) > by_kernel.capacity:  # the keys are NaN, whatever the values are
        assert bool(of_kernel.keys[..., -1].isinf().all())
        return
    torch.testing.assert_close(found.value, expected.value, rtol=0, atol=0)
    for own, other in ((of_kernel.keys, of_torch.keys), (of_kernel.values, of_torch.values)):
        assert bool((own >= other).all())
        assert bool((own <= other * (1 + 2.0**-14) + 2.0**-56).all())
