"""Negative-bit views, empty batches, numbers at the ends of int64 and float64, other default devices."""

import math

import pytest
import torch
from torch.nn import functional

from alibi_attn import (
    ALiBiAttention,
    KVCache,
    alibi_attention,
    alibi_attention_varlen,
    alibi_slopes,
    certified_block_mask,
    explain,
    forgetting_attention,
    head_reach,
    interpolate_slopes,
)
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.run.decoding import attend_near, measured_norms
from alibi_attn.attention.run.dispatch import BACKENDS
from alibi_attn.attention.toeplitz import toeplitz_attention
from alibi_attn.nn.linear.fastest import linear

BACKWARD = [name for name in BACKENDS if name not in ("fused", "flex") and (name != "native" or not build.why_not())]
HUGE, HUGER = 2**70, 10**400
SLOPES = torch.tensor(alibi_slopes(4), dtype=torch.float32)


def negated(x: torch.Tensor) -> torch.Tensor:
    """−x as a view that shares the memory of x."""
    return torch._neg_view(x)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKWARD if name != "banded"])
def test_a_negative_view_of_a_table_has_its_sign(backend: str) -> None:
    """The fuzz draws such views of all else."""
    query, key, value, table = *torch.randn(3, 2, 4, 100, 16), torch.randn(4, 100)
    found = toeplitz_attention(query, key, value, negated(-table), backend=backend)
    assert_close(found, toeplitz_attention(query, key, value, table, backend="reference"))


@torch.no_grad()
@pytest.mark.parametrize("negative", range(3))
def test_decoding_and_linear_maps_read_negative_views_with_their_sign(negative: int) -> None:
    query, (key, value) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 4, 500, 16)
    expected = alibi_attention(query, key, value, SLOPES, backend="reference")
    views = [negated(-x) if at == negative else x for at, x in enumerate((query, key, value))]
    assert_close(attend_near(*views, SLOPES, measured_norms(*views[1:])), expected)
    assert_close(attend_near(*views, negated(-SLOPES), None), expected)
    maps = torch.randn(2, 64), torch.randn(96, 64), torch.randn(96)
    assert_close(linear(*(negated(-x) if at == negative else x for at, x in enumerate(maps))), functional.linear(*maps))


@torch.no_grad()
def test_decoding_reads_values_of_any_stride() -> None:
    query, (key, value) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 4, 500, 16)
    strided = value.mT.contiguous().mT
    assert_close(attend_near(query, key, strided, SLOPES, None), alibi_attention(query, key, value, SLOPES))


def test_the_kernels_themselves_take_an_empty_batch() -> None:
    """As called by an exported program with a dynamic batch."""
    if build.why_not() is not None:
        pytest.skip(f"no kernels: {build.why_not()}")
    from alibi_attn.attention.backends.native import backend
    from alibi_attn.attention.call.validation import make_spec

    inputs = [torch.randn(0, 8, 500, 64, requires_grad=True) for _ in range(3)]
    output, _ = backend.run(make_spec(*inputs), *inputs)
    output.sum().backward()
    assert inputs[0].grad is not None


@pytest.mark.parametrize("options", [{}, {"forget_gate": True}, {"qk_norm": True}, {"num_kv_heads": 2}])
def test_a_layer_takes_an_empty_batch(options: dict) -> None:
    layer = ALiBiAttention(64, 8, **options)
    layer(torch.randn(0, 5, 64)).sum().backward()
    with torch.no_grad():
        for cache in (KVCache(), layer.reach_cache(score_bound=5.0)):
            for length in (5, 1):
                assert layer(torch.randn(0, length, 64), cache=cache).shape == (0, length, 64)


QUERY, KEY, VALUE = torch.ones(3, 1, 4, 9, 16)
ROWS = [x[0].transpose(0, 1) for x in (QUERY, KEY, VALUE)]
FUNCTIONS = {
    "alibi_attention": lambda **options: alibi_attention(QUERY, KEY, VALUE, **options),
    "symmetric": lambda **options: alibi_attention(QUERY, KEY, VALUE, causal=False, **options),
    "varlen": lambda **options: alibi_attention_varlen(*ROWS, torch.tensor([0, 4, 9]), **options),
    "forgetting": lambda **options: forgetting_attention(QUERY, KEY, VALUE, -torch.ones(1, 4, 9), **options),
    "toeplitz": lambda **options: toeplitz_attention(QUERY, KEY, VALUE, torch.ones(4, 9), **options),
    "head_reach": lambda **options: head_reach(QUERY, KEY, **options),
    "explain": lambda **options: explain(QUERY, KEY, VALUE, **options),
    "certified_block_mask": lambda **options: certified_block_mask(QUERY, KEY, **options),
    "decoding": lambda **options: attend_near(QUERY[:, :, -1:], KEY, VALUE, SLOPES, None, **options),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_window_beyond_int64_hides_nothing_and_a_scale_beyond_float64_is_refused(name: str) -> None:
    function = FUNCTIONS[name]
    widest, without = function(window=HUGE), function()
    if isinstance(without, torch.Tensor):
        torch.testing.assert_close(widest, without)
    for scale in (HUGER, -HUGER):
        with pytest.raises(ValueError, match="but must be finite"):
            function(scale=scale)


@pytest.mark.parametrize("backend", [*BACKWARD, "flex"])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_every_backend_takes_a_window_beyond_int64(backend: str, causal: bool) -> None:
    inputs = torch.randn(3, 1, 4, 200, 16).unbind(0)
    if backend == "flex":
        pytest.importorskip("torch.nn.attention.flex_attention")
        assert head_reach(*inputs[:2], causal=causal, window=HUGE, backend=backend).shape == (1, 4)
        return
    found = alibi_attention(*inputs, causal=causal, window=HUGE, backend=backend)
    assert_close(found, alibi_attention(*inputs, causal=causal, backend="reference"))


@pytest.mark.parametrize("tolerance", [5e-324, 1.5e-323])
def test_a_tolerance_too_small_to_be_halved_skips_nothing(tolerance: float) -> None:
    inputs = torch.randn(3, 1, 4, 200, 16).unbind(0)
    for backend in BACKWARD:
        found, expected = (
            alibi_attention(*inputs, causal=False, tolerance=epsilon, backend=backend) for epsilon in (tolerance, 0.0)
        )
        assert torch.equal(found, expected), backend
    masks = [certified_block_mask(*inputs[:2], causal=False, tolerance=epsilon) for epsilon in (tolerance, 0.0)]
    assert torch.equal(*(mask.kv_num_blocks for mask in masks))


def test_other_numbers_without_end_are_refused() -> None:
    for slopes in ([HUGER] * 4, [-HUGER] * 4):
        with pytest.raises(ValueError, match="slopes must be finite"):
            ALiBiAttention(64, 4, slopes=slopes)
    with pytest.raises(ValueError, match="target is a length"):
        interpolate_slopes([0.5], 1, HUGER)
    layer = ALiBiAttention(64, 4, window=HUGE, qk_norm=True)
    assert layer.static_reach(score_bound=HUGER).tolist() == [2**60] * 4


def test_writing_to_an_explanation_changes_no_later_call() -> None:
    slopes = SLOPES.clone()
    before = [alibi_attention(QUERY, KEY, VALUE, given) for given in (None, slopes)]
    for given in (None, slopes):
        explain(QUERY, KEY, VALUE, given).slopes[:] = 7.0
    assert torch.equal(slopes, SLOPES)
    for given, expected in zip((None, slopes), before, strict=True):
        assert torch.equal(alibi_attention(QUERY, KEY, VALUE, given), expected)


@pytest.mark.parametrize("backend", BACKWARD)
def test_torchs_default_device_changes_nothing(backend: str) -> None:
    inputs, hidden = torch.randn(3, 1, 4, 300, 16), torch.arange(300)[None] < 5
    unused = inputs.masked_fill(hidden[:, None, :, None], torch.nan)

    def results() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*inputs.unbind(0), SLOPES)]
        output, lse = alibi_attention(*leaves, return_lse=True, backend=backend)
        gradients = torch.autograd.grad(output.sum() + lse.sum(), leaves)
        masked = alibi_attention(inputs[0], *unused[1:], SLOPES, causal=False, key_mask=~hidden, backend=backend)
        reach = head_reach(*inputs[:2], SLOPES, key_mask=~hidden, backend=backend)
        return [output, *gradients, masked, reach]

    expected = results()
    with torch.device("meta"):
        assert all(map(torch.equal, results(), expected))


@torch.no_grad()
def test_torchs_default_device_changes_no_block_mask_and_no_decoding_step() -> None:
    query, key, value = torch.randn(3, 1, 4, 500, 16).unbind(0)
    norms = measured_norms(key, value)

    def results() -> list[torch.Tensor]:
        steps = [attend_near(query[:, :, -n:], key, value, SLOPES, norms, visible=[(5, 490)]) for n in (1, 20)]
        return [certified_block_mask(query, key, SLOPES).kv_num_blocks, *steps, measured_norms(key, value).keys]

    expected = results()
    with torch.device("meta"):
        assert all(map(torch.equal, results(), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKWARD)
def test_a_query_of_nan_has_no_gradient_and_spoils_no_other(backend: str, dtype: torch.dtype) -> None:
    """In bf16 AMX multiplies the numbers behind a row's end by zeros; 27 keys end within such a product."""
    q, k, v = (torch.randn(1, 2, 27, 80).to(dtype).requires_grad_() for _ in range(3))
    with torch.no_grad():
        q[0, 1, 5, 3] = math.nan
    output = alibi_attention(q, k, v, [0.5, 0.1], causal=False, backend=backend)
    (gradient,) = torch.autograd.grad(output, q, torch.ones_like(output))
    is_bad = gradient.isnan().any(-1)
    assert bool(is_bad[0, 1, 5])
    assert int(is_bad.sum()) == 1


@pytest.mark.parametrize("backend", BACKWARD)
@pytest.mark.parametrize("largest", [1e19, 1e30])
def test_gradients_that_should_be_0_are_rounded_at_most_by_their_products(backend: str, largest: float) -> None:
    """With a single key dq is 0: a difference of two products with k, each of which fp32 holds."""
    query, key, value, grad = torch.randn(4, 1, 2, 1, 16)
    key *= largest
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    dq, dk, dv = torch.autograd.grad(alibi_attention(*leaves, [1.0, 0.5], backend=backend), leaves, grad)
    product = float(grad.norm(dim=-1).max() * value.norm(dim=-1).max())
    assert float(dq.abs().max()) <= 1e-6 * product * float(key.double().norm(dim=-1).max())
    assert float(dk.abs().max()) <= 1e-6 * product * float(query.norm(dim=-1).max())
    torch.testing.assert_close(dv, grad)


def test_sinks_in_fp32_next_to_fp64_queries_lose_one_rounding() -> None:
    query, key, value, grad = torch.randn(4, 1, 2, 40, 8, dtype=torch.float64)
    wide = torch.randn(2).double().requires_grad_()
    narrow = wide.detach().float().requires_grad_()
    found, true = (
        torch.autograd.grad(alibi_attention(query, key, value, sink_logits=x), x, grad)[0] for x in (narrow, wide)
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), true, rtol=1.2e-7, atol=0.0)


@pytest.mark.parametrize("causal", [True, False])
def test_compiled_dense_ignores_a_hidden_key_whose_scores_fp32_holds(causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 20, 8)
    key[:, :, 12] *= 1e30
    options = {"causal": causal, "key_mask": None if causal else (torch.arange(20) != 12)[None]}
    rows = slice(0, 12 if causal else 20)
    compiled = torch.compile(lambda *x: alibi_attention(*x, backend="dense", **options), backend="eager")
    true = alibi_attention(query, key, value, backend="reference", **options)
    assert_close(compiled(query, key, value)[:, :, rows], true[:, :, rows])
