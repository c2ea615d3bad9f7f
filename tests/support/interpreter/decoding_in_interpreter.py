"""Counts the operations of calls, and tests decoding with remembered norms; runs with Triton's interpreter."""

from typing import Any
from unittest import mock

import attention_checks
import torch
from attention_cases import Case
from attention_oracle import Answer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import split_keys
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS
from alibi_attn.attention.backends.fused.plan import How, planned
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run import decoding
from alibi_attn.attention.run.dispatch import RUNS
from alibi_attn.nn import ALiBiAttention, KVCache

MANY = mock.patch.object(split_keys, "WHOLE_BYTES", 0)  # keys are so many that a step does not read all


class _Counting(TorchDispatchMode):
    """Counts the operations that a GPU would launch: all but views, allocations and the interpreter's many copies."""

    FREE = (
        "view",
        "expand",
        "slice",
        "select",
        "squeeze",
        "stride",
        "empty",
        "detach",
        "alias",
        "transpose",
        "permute",
        "unbind",
        "set_",
        "copy_",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(free in str(func) for free in self.FREE):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def groups_differ_from_calls_of_their_own() -> list[float]:
    """For 1 and 5 queries, by how much heads in three groups that keep different numbers of keys differ from three calls."""
    found, heads, window = [], ((0, 2), (4, 8), (2, 4)), 150
    for queries in (1, 5):
        query, slopes = torch.randn(2, 8, queries, 16).half(), torch.rand(8)
        keys, values = torch.randn(2, 2, 4, 300, 16).half()
        lasts = [x[:, first // 2 : end // 2] for x in (keys, values) for first, end in heads]
        kept = [(lasts[at][:, :, -n:], lasts[at + 3][:, :, -n:]) for at, n in enumerate((70, 300, 128))]
        output = decoding.attend_groups(query, kept, slopes, heads, windows=(window,) * 3)
        for (first, end), (key, value) in zip(heads, kept, strict=True):
            one = alibi_attention(query[:, first:end], key, value, slopes[first:end], window=window, backend="fused")
            found.append(float((output[:, first:end] - one).abs().max()))
    return found


def a_reach_cache_is_one_call() -> tuple[float, int]:
    """(the largest difference between a layer's steps and one pass, how many steps were one call)."""
    torch.manual_seed(0)
    layer = ALiBiAttention(64, 8, num_kv_heads=4, slopes=[2.0, 2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.0])
    x, calls, attend_groups = torch.randn(1, 140, 64), [], decoding.attend_groups
    cache = layer.reach_cache(score_bound=8.0)

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return attend_groups(*arguments, **options)

    few = mock.patch.object(decoding, "reads_groups", lambda query: query.shape[2] <= 8)
    with torch.no_grad(), few, mock.patch.object(decoding, "attend_groups", counted):
        parts = [layer(some, cache=cache) for some in x.split([130, 1, 8, 1], dim=1)]
        return float((torch.cat(parts, 1) - layer(x)).abs().max()), len(calls)


def operations_of_plain_calls() -> dict[str, int]:
    """Counts torch's operations in the parts of a plain call and in a decoding step; our kernels not included."""
    query, key, value = torch.randn(1, 4, 130, 16), torch.randn(1, 2, 130, 16), torch.randn(1, 2, 130, 16)
    counted = {}
    spec = make_spec(query, key, value)
    with _Counting() as counting:
        tiles, _ = planned(spec, query, key, value, How(PLAN_ROWS))
    counted["certificate"] = len(counting.names)
    with _Counting() as counting:
        output, lse = fused.forward(spec, query, key, value, tiles)
    counted["forward"] = len(counting.names)
    with _Counting() as counting:
        fused.backward(spec, query, key, value, output, lse, output, None, tiles, slopes_wanted=False)
    counted["backward"] = len(counting.names)
    masked = make_spec(
        query, key, value, key_mask=torch.ones(1, 130, dtype=torch.bool), segment_ids=torch.zeros(1, 130).long()
    )
    with _Counting() as counting:
        tiles, _ = planned(masked, query, key, value, How(PLAN_ROWS))
        output, lse = fused.forward(masked, query, key, value, tiles)
        fused.backward(masked, query, key, value, output, lse, output, None, tiles, slopes_wanted=False)
    counted["masked"] = len(counting.names)
    known_norms, spec = Norms.of(key, value), make_spec(query[:, :, -1:], key, value)
    with _Counting() as counting:
        fused.decode(spec, query[:, :, -1:], key, value, known_norms)
    counted["decoding"] = len(counting.names)
    with _Counting() as counting:
        alibi_attention(query, key, value, backend="fused")
    counted["from the host"] = sum("lift_fresh" in name for name in counting.names)
    return counted


def decoding_with_remembered_norms(window: int | None) -> float:
    """The largest error of `decode` with given norms; checks that it reads near bad keys, not far ones if they are many."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, 3, 16, generator=generator)
    key, value = (torch.randn(2, 4, 1500, 16, generator=generator) for _ in range(2))
    key[1, 2, 100] *= 40  # makes its tile an outlier tile
    slopes = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.3, 0.4, 1.0, 0.9])
    spec, known_norms = make_spec(query, key, value, slopes, window=window), Norms.of(key, value)
    whole, _ = fused.decode(spec, query, key, value, known_norms)
    true, _ = RUNS["reference"](spec, query.double(), key.double(), value.double())
    with MANY:
        before, _ = fused.decode(spec, query, key, value, known_norms)
    # Only the last keys and those of outlier tiles are read; the others may have any value.
    far = torch.ones(2, 4, 1500, 1, dtype=torch.bool)
    far[:, :, -640:] = False
    outliers = fused.plan(spec, query, key, value, known_norms).outlier_tiles[:, ::2]
    for b, k, p in (outliers >= 0).nonzero().tolist():
        start = int(outliers[b, k, p]) * TILE
        far[b, k, start : start + TILE] = False
    assert not bool(far[1, 2, 64:128].any()), "the tile of the outlying key should be an outlier tile"
    assert far.double().mean() > 0.5
    far_key, far_value = (x.masked_fill(far, torch.nan) for x in (key, value))
    with MANY:
        assert torch.equal(fused.decode(spec, query, far_key, far_value, known_norms)[0], before), "a far key was read"
    key[:, :, -3] = torch.inf
    value[0, :, -1] = torch.nan
    seen = fused.decode(spec, query, key, value, known_norms)[0].isnan().all(-1)
    assert bool(seen.all()), "a bad key that every query sees left no trace"
    key[:, :, -3] = 0
    seen = fused.decode(spec, query, key, value, known_norms)[0].isnan().all(-1)
    assert bool((seen[0] == torch.tensor([False, False, True])).all()), "only the last query sees the last key"
    assert not bool(seen[1].any())
    return max(float((x - true).abs().max()) for x in (before, whole))


def masked_bad_keys_change_nothing_in_decoding() -> None:
    """Checks that NaN hidden by a key mask, and a bad key seen by the last query only, change no other query."""
    query, key, value = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 90, 8), torch.randn(2, 2, 90, 8)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, 70:75] = mask[1, :30] = False
    before = alibi_attention(query, key, value, key_mask=mask, backend="fused")
    key[0, :, 72], value[1, :, 3] = torch.nan, torch.inf
    torch.testing.assert_close(alibi_attention(query, key, value, key_mask=mask, backend="fused"), before)
    key[1, 1, 89, 0] = torch.nan
    after = alibi_attention(query, key, value, key_mask=mask, backend="fused")
    assert bool(after[1, 2:, 1].isnan().all())
    after[1, 2:, 1] = before[1, 2:, 1]
    torch.testing.assert_close(after, before)


def a_layer_decodes_near() -> tuple[float, int]:
    """Returns (largest difference between a layer with a cache and one full pass, number of calls of `decode`)."""
    torch.manual_seed(0)
    layer, calls = ALiBiAttention(32, 4, num_kv_heads=2).eval(), []
    x, cache = torch.randn(2, 200, 32), KVCache()
    on_cpu, decode = decoding._on_cpu, fused.decode

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return decode(*arguments)

    try:
        decoding._on_cpu, fused.decode = lambda query: False, counted
        with torch.no_grad():
            parts = [layer(chunk, cache=cache) for chunk in x.split([150, 1, 1, 8, 40], dim=1)]
            whole = layer(x)
    finally:
        decoding._on_cpu, fused.decode = on_cpu, decode
    return float((torch.cat(parts, 1) - whole).abs().max()), len(calls)


def static_steps_read_near(window: int | None) -> tuple[float, bool]:
    """(the largest difference between a layer with a static cache and one pass, whether it read no far key)."""
    torch.manual_seed(0)
    layer = ALiBiAttention(32, 4, num_kv_heads=2, slopes=[2.0, 1.5, 1.0, 0.8], window=window).eval()
    x, cache, on_cpu = torch.randn(2, 573, 32), KVCache(capacity=700), decoding._on_cpu
    try:
        decoding._on_cpu = lambda query: False
        with torch.no_grad():
            parts = [layer(chunk, cache=cache) for chunk in x[:, :571].split([500, 70, 1], dim=1)]
            assert cache.fixed is not None
            with MANY:
                parts += [layer(chunk, cache=cache) for chunk in x[:, 571:].split(1, dim=1)]
                for held in cache.fixed.tensors[0]:
                    held[:, :, :384] = torch.nan  # three tiles before the last
                cache.crop(572)
                again = layer(x[:, 572:], cache=cache)
    finally:
        decoding._on_cpu = on_cpu
    return float((torch.cat(parts, 1) - layer(x)).abs().max()), torch.equal(again, parts[-1])


def without_gradients(case: Case, whole_keys: int) -> Answer:
    """A call without gradients, which scores all of up to `whole_keys` keys."""
    with mock.patch.object(fused, "WHOLE_KEYS", whole_keys):
        return attention_checks.without_gradients(case, torch.float32, backend="fused")
