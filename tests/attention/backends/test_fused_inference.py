"""Calls of the Triton kernels without gradients: decoding, short calls that need no certificate, and few operations.

Tests that do not name the interpreter run in its process.
"""

import dataclasses
from unittest import mock

import attention_checks
import fused_in_interpreter as inside
import pytest
import torch
from attention_calls import Watched
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import assert_exact

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

interpreted = pytest.mark.usefixtures("interpreter")
MANY = mock.patch.object(split_keys, "WHOLE_BYTES", 0)  # a step has too many keys to read all of them
OFF_CPU = mock.patch.object(decoding, "_on_cpu", return_value=False)

DECODE = Case("decode", batch=2, heads=4, kv_heads=2, query_len=3, key_len=700, slopes="steep", head_dim=16)
FEW_HEADS = Case("few heads", batch=1, heads=1, query_len=40, key_len=500, slopes="random", head_dim=16)
DECODE_SINK = dataclasses.replace(DECODE, name="decode with a sink", sink=200.0)
# Calls without gradients: few queries without and with a plan, all keys of the masks, and more than WHOLE_KEYS.
WITHOUT_GRADIENTS = (
    ("one query", 1024),
    ("offset after all keys", 1024),
    ("an offset a sequence, window", 1024),
    ("key bias, mask and segments", 1024),
    ("everything", 1024),
    ("steep, long, window and mask", 1024),
    ("steep, long", 0),
)


@interpreted
@pytest.mark.parametrize(("name", "whole_keys"), WITHOUT_GRADIENTS)
def test_calls_without_gradients_equal_the_definition(name: str, whole_keys: int) -> None:
    """A call scores all of up to `whole_keys` keys."""
    (case,) = (case for case in (*CASES, *KEY_BIASES) if case.name == name)
    with mock.patch.object(fused, "WHOLE_KEYS", whole_keys):
        got = attention_checks.without_gradients(case, torch.float32, backend="fused")
    assert_exact(case, torch.float32, got, tolerance=2.0**-28)


ONE_ROW = dataclasses.replace(DECODE_SINK, name="one row", batch=1)


@interpreted
@pytest.mark.parametrize(("case", "of_parts"), [(DECODE, 1), (DECODE_SINK, 1), (FEW_HEADS, None), (ONE_ROW, 2)])
def test_decoding_equals_forward(case: Case, of_parts: int | None) -> None:
    """The split kernel gives the last rows of a full pass."""
    spec, query, key, value = inside.call_of(case, tolerance=2.0**-28)
    assert split_keys.is_split(spec, query)
    assert of_parts in (None, split_keys.decode_parts(spec, query))
    found = fused.forward(spec, query, key, value, fused.plan(spec, query, key, value))
    more = TILE + 1
    padded = torch.cat([torch.zeros(spec.batch, spec.num_heads, more, spec.head_dim), query], 2)
    longer = dataclasses.replace(spec, query_len=more + spec.query_len, query_offset=case.first_position - more)
    whole = fused.forward(longer, padded, key, value, fused.plan(longer, padded, key, value))
    for few, all_rows in zip(found, whole, strict=True):
        torch.testing.assert_close(few, all_rows[:, :, more:], rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("window", [None, 300])
def test_decoding_reads_only_the_keys_within_reach(window: int | None) -> None:
    """With given norms, near bad keys, and not far ones if they are many."""
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
    assert max(float((x - true).abs().max()) for x in (before, whole)) < 1e-5


@interpreted
def test_masked_bad_keys_change_nothing_in_decoding() -> None:
    """NaN hidden by a key mask, and a bad key seen by the last query only, change no other query."""
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


@interpreted
def test_bad_numbers_affect_only_queries_that_see_them() -> None:
    """On the diagonal of plain causal attention, whose tiles are read without checks if all numbers are finite."""
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    before = alibi_attention(q, k, v, backend="fused")
    for tensor, at, bad in ((k, 150, torch.nan), (v, 220, torch.nan), (v, 220, torch.inf), (v, 299, torch.nan)):
        clean, tensor[0, 1, at, 3] = tensor[0, 1, at, 3].item(), bad
        output = alibi_attention(q, k, v, backend="fused")
        tensor[0, 1, at, 3] = clean
        torch.testing.assert_close(output[:, 1, :at], before[:, 1, :at])
        torch.testing.assert_close(output[:, 0], before[:, 0])
        assert not bool(output[0, 1, at:].isfinite().all(-1).any()), f"{bad} at {at} left no trace"


@interpreted
@torch.no_grad()
def test_a_layer_decodes_by_the_kernel() -> None:
    layer = ALiBiAttention(32, 4, num_kv_heads=2).eval()
    x, cache, chunks = torch.randn(2, 200, 32), KVCache(), [150, 1, 1, 8, 40]
    with OFF_CPU, mock.patch.object(fused, "decode", wraps=fused.decode) as decode:
        parts = [layer(chunk, cache=cache) for chunk in x.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-5)
    assert decode.call_count == len(chunks)


@interpreted
@torch.no_grad()
@pytest.mark.parametrize("window", [None, 50])
def test_a_step_with_a_static_cache_reads_only_near_keys(window: int | None) -> None:
    """Its position is in a tensor, so every step is the same launches."""
    layer = ALiBiAttention(32, 4, num_kv_heads=2, slopes=[2.0, 1.5, 1.0, 0.8], window=window).eval()
    x, cache = torch.randn(2, 573, 32), KVCache(capacity=700)
    with OFF_CPU:
        parts = [layer(chunk, cache=cache) for chunk in x[:, :571].split([500, 70, 1], dim=1)]
        with MANY:
            parts += [layer(chunk, cache=cache) for chunk in x[:, 571:].split(1, dim=1)]
            for held in cache.fixed.tensors[0]:
                held[:, :, :384] = torch.nan  # three tiles before the last
            cache.crop(572)
            assert torch.equal(layer(x[:, 572:], cache=cache), parts[-1])
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("queries", [1, 5])
def test_groups_of_heads_in_one_call_get_the_bits_of_their_own_calls(queries: int) -> None:
    """Three groups, which keep different numbers of keys."""
    heads, window = ((0, 2), (4, 8), (2, 4)), 150
    query, slopes = torch.randn(2, 8, queries, 16).half(), torch.rand(8)
    keys, values = torch.randn(2, 2, 4, 300, 16).half()
    lasts = [[x[:, first // 2 : end // 2] for x in (keys, values)] for first, end in heads]
    kept = [(key[:, :, -n:], value[:, :, -n:]) for (key, value), n in zip(lasts, (70, 300, 128), strict=True)]
    output = decoding.attend_groups(query, kept, slopes, heads, windows=(window,) * 3)
    for (first, end), (key, value) in zip(heads, kept, strict=True):
        one = alibi_attention(query[:, first:end], key, value, slopes[first:end], window=window, backend="fused")
        assert torch.equal(output[:, first:end], one)


@interpreted
@torch.no_grad()
def test_a_layer_with_a_reach_cache_decodes_in_one_call() -> None:
    layer = ALiBiAttention(64, 8, num_kv_heads=4, slopes=[2.0, 2.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.0])
    x, cache = torch.randn(1, 140, 64), layer.reach_cache(score_bound=8.0)
    few = mock.patch.object(decoding, "reads_groups", lambda query: query.shape[2] <= 8)
    with few, mock.patch.object(decoding, "attend_groups", wraps=decoding.attend_groups) as attend_groups:
        parts = [layer(some, cache=cache) for some in x.split([130, 1, 8, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-5)
    assert attend_groups.call_count == 3


# Views, allocations and the interpreter's many copies launch nothing on a GPU.
FREE = ("view", "expand", "slice", "select", "squeeze", "stride", "empty", "detach", "alias", "transpose", "permute", "unbind",
        "set_", "copy_")  # fmt: skip


def launched(watched: Watched) -> list[str]:
    return [name for name in watched.names if not any(free in name for free in FREE)]


@interpreted
def test_a_plain_call_takes_few_operations() -> None:
    """On a GPU each operation is a launch, and launches would cost more than short attention. Our kernels are not counted."""
    query, key, value = torch.randn(1, 4, 130, 16), torch.randn(1, 2, 130, 16), torch.randn(1, 2, 130, 16)
    marks = {"key_mask": torch.ones(1, 130, dtype=torch.bool), "segment_ids": torch.zeros(1, 130).long()}
    for options in ({}, marks):
        spec = make_spec(query, key, value, **options)
        with Watched() as counting:
            tiles, _ = planned(spec, query, key, value, How(PLAN_ROWS))
            before = len(launched(counting))
            output, lse = fused.forward(spec, query, key, value, tiles)
            forward = len(launched(counting)) - before
            fused.backward(spec, query, key, value, output, lse, output, None, tiles, slopes_wanted=False)
            backward = len(launched(counting)) - forward - before
        assert before + forward + backward <= 16, counting.names
        assert options or (before <= 2 and forward <= 4 and backward <= 8), counting.names
    known_norms, spec = Norms.of(key, value), make_spec(query[:, :, -1:], key, value)
    with Watched() as counting:
        fused.decode(spec, query[:, :, -1:], key, value, known_norms)
    assert len(launched(counting)) <= 4, counting.names
    with Watched() as counting:
        alibi_attention(query, key, value, backend="fused")
    assert not [name for name in counting.names if "lift_fresh" in name], "numbers come from the host"
