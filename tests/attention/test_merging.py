"""Windows per head, sinks, prefixes and explicit positions against dense masks in fp64 (`support/oracles/parts_oracle.py`)."""

import math

import dropout_oracle
import pytest
import torch
from parts_oracle import seen_and_bias, truth

from alibi_attn.attention.api import alibi_attention, explain, head_reach
from alibi_attn.attention.backends.native import build

ON_CPU = ("reference", "dense", "banded", "native")
SLOPES = [0.5, 0.2, 0.1, 0.02]
WINDOWS = [5, 9, 400, 9]


def stamps(s: int, *, start: float = 0.0, batch: int = 2) -> torch.Tensor:
    """Sorted times with gaps and ties."""
    g = torch.Generator().manual_seed(s)
    steps = torch.rand(batch, s, generator=g, dtype=torch.float64) * (torch.rand(batch, s, generator=g) < 0.8)
    return start + steps.cumsum(-1)


def options_of(kind: str, s: int) -> dict:
    prefix = torch.tensor([s // 4, min(s, 67)])
    return {
        "prefix": {"prefix_len": prefix},
        "prefix and offset": {"prefix_len": prefix, "query_offset": 20},
        "windows": {"window": WINDOWS},
        "symmetric windows": {"window": WINDOWS, "causal": False},
        "sinks": {"window": 20, "sinks": 3},
        "symmetric sinks": {"window": 20, "sinks": 30, "causal": False},
        "positions": {"positions": stamps(s)},
        "symmetric positions": {"positions": stamps(s), "causal": False, "right_slopes": [0.1, 0.3, 0.0, 1.0]},
        "all": {"positions": stamps(s).float(), "window": [5, 70, 33, 400], "sinks": 3, "prefix_len": prefix},
    }[kind]


KINDS = ("prefix", "prefix and offset", "windows", "symmetric windows", "sinks", "symmetric sinks", "positions",
         "symmetric positions", "all")  # fmt: skip


def drawn(t: int, s: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(t + s)
    tensors = [torch.randn(2, h, n, 16, generator=g).to(dtype) for h, n in ((4, t), (2, s), (2, s))]
    return [*tensors, torch.tensor(SLOPES, dtype=torch.float64 if dtype == torch.float64 else torch.float32)]


def results(function, inputs, options):
    """Output, lse (0 where −inf) and the gradients of fixed sums of both, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output, lse = function(*leaves, **options)
    g = torch.Generator().manual_seed(0)
    seen = lse.double().masked_fill(lse == -math.inf, 0.0)
    total = sum((x.double() * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in (output, seen))
    gradients = torch.autograd.grad(total, leaves)
    return [x.detach().double() for x in (output, seen, *gradients)]


def assert_equal_to_truth(inputs, options, *, error: float, backend: str = "auto") -> None:
    def ours(*x, **given):
        return alibi_attention(*x, return_lse=True, backend=backend, **given)

    got, expected = results(ours, inputs, options), results(truth, inputs, options)
    for name, x, y in zip(("output", "lse", "query", "key", "value", "slopes"), got, expected, strict=True):
        off = float((x - y).abs().max() / (1 + y.abs().max()))
        assert off <= error, f"{name} is off by {off:.2g}"


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("kind", KINDS)
def test_output_lse_and_gradients_equal_the_definition(backend: str, kind: str) -> None:
    for t, s in ((150, 150), (70, 150), (1, 90)):
        options = options_of(kind, s)
        if backend == "banded" and "positions" in options:
            with pytest.raises(ValueError, match=r"banded.*does not compute positions"):
                alibi_attention(*drawn(t, s), backend=backend, **options)
            continue
        assert_equal_to_truth(drawn(t, s), options, backend=backend, error=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_segments_and_key_biases_still_apply(kind: str) -> None:
    g = torch.Generator().manual_seed(3)
    masks = {
        "key_mask": torch.rand(2, 130, generator=g) < 0.7,
        "segment_ids": torch.randint(0, 3, (2, 130), generator=g).sort(-1).values,
        "key_bias": torch.randn(2, 4, 130, generator=g),
    }
    if "offset" in kind:
        del masks["segment_ids"]
    for dtype, error in ((torch.float32, 5e-6), (torch.float64, 1e-12)):
        assert_equal_to_truth(drawn(90, 130, dtype), options_of(kind, 130) | masks, backend="native", error=error)


@pytest.mark.parametrize("kind", ["prefix", "symmetric sinks", "symmetric positions"])
def test_large_key_biases_cost_merged_parts_no_digits(kind: str) -> None:
    q, k, v, slopes = drawn(90, 130)
    key_bias = 1e6 + torch.arange(130.0).remainder(3).expand(2, 4, -1)
    expected = truth(q, k, v, slopes, key_bias=key_bias, **options_of(kind, 130))[0]
    found = alibi_attention(q, k, v, slopes, key_bias=key_bias, backend="native", **options_of(kind, 130))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def test_the_checker_fails_on_wrong_answers() -> None:
    inputs = drawn(90, 130)
    for right, wrong in (
        ({"prefix_len": torch.tensor([40, 60])}, {"prefix_len": torch.tensor([40, 61])}),
        ({"window": [5, 9, 40, 9]}, {"window": [5, 9, 41, 9]}),
        ({"window": 9, "sinks": 3}, {"window": 9, "sinks": 2}),
        ({"positions": stamps(130)}, {"positions": stamps(130) * 1.01}),
    ):
        expected = truth(*inputs, **right)[0]
        assert (alibi_attention(*inputs, **right).double() - expected).abs().max() < 1e-5
        assert (alibi_attention(*inputs, **wrong).double() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_times_of_a_billion_seconds_lose_no_digits(causal: bool) -> None:
    """fp64 holds seconds since 1970 to 0.2 µs, and their differences are biases: those are exact."""
    inputs = [x.double() for x in drawn(200, 300)]
    options = {"positions": stamps(300, start=1.7e9), "causal": causal}
    assert_equal_to_truth(inputs, options, backend="native", error=1e-11)
    spread = {"positions": torch.linspace(0.0, 2e9, 300, dtype=torch.float64).expand(2, -1), "causal": causal}
    assert_equal_to_truth([*inputs[:3], inputs[3] * 1e-6], spread, backend="native", error=1e-11)
    assert_equal_to_truth([x.float() for x in inputs], options, backend="native", error=5e-6)


def test_queries_may_have_their_own_positions() -> None:
    inputs, at = drawn(60, 100), stamps(100)
    later = at[:, 40:] + 0.5 * torch.cat([at[:, 41:] - at[:, 40:-1], torch.ones(2, 1)], 1)  # between two keys
    for causal in (True, False):
        options = {"positions": at, "query_positions": later, "causal": causal}
        assert_equal_to_truth(inputs, options, backend="native", error=5e-6)
    assert_equal_to_truth(inputs, {"positions": at, "query_positions": later + 100}, backend="native", error=5e-6)
    # Anywhere after it.
    beyond = {"positions": at, "query_positions": at[:, 40:] + 90, "prefix_len": torch.tensor([3, 41])}
    for backend in ("dense", "native"):
        assert_equal_to_truth(inputs, beyond, backend=backend, error=1e-5)


@pytest.mark.parametrize("backend", ["dense", "native"])
@pytest.mark.parametrize("t", [40, 160])
def test_queries_may_be_anywhere_between_the_keys(backend: str, t: int) -> None:
    """A grid of times that begins before all events and ends after them; ties with keys included."""
    inputs, at = drawn(t, 100), stamps(100)
    grid = torch.linspace(-5.0, float(at.max()) + 5, t, dtype=torch.float64).expand(2, -1).clone()
    grid[:, t // 2] = at.gather(1, (at < grid[:, t // 2 : t // 2 + 1]).sum(1, keepdim=True) - 1)[:, 0]
    grid = grid.sort(-1).values
    g = torch.Generator().manual_seed(0)
    masks = {"key_mask": torch.rand(2, 100, generator=g) < 0.7, "key_bias": torch.randn(2, 4, 100, generator=g)}
    for more in ({}, masks):
        options = {"positions": at, "query_positions": grid, "causal": False, **more}
        assert_equal_to_truth(inputs, options, backend=backend, error=1e-5)
    leaning = {"positions": at, "query_positions": grid, "causal": False, "right_slopes": [0.1, 0.3, math.inf, 1.0]}
    assert_equal_to_truth(inputs, leaning, backend=backend, error=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_exact_as_torch(kind: str) -> None:
    q, k, v, slopes = drawn(150, 150, torch.bfloat16)
    options = options_of(kind, 150)
    exact = truth(q, k, v, slopes, **options)[0]
    seen, bias = seen_and_bias(q, k, slopes, **options)
    mask = bias.masked_fill(~seen, -math.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0).to(torch.bfloat16)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    blind = ~seen.any(-1)
    theirs = theirs.masked_fill(blind[..., None], 0.0)
    ours = alibi_attention(q, k, v, slopes, backend="native", **options)
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).square().mean() <= 4 * (theirs.double() - exact).square().mean()


@pytest.mark.parametrize("backend", ["dense", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_keys_are_never_used(backend: str, kind: str) -> None:
    q, k, v, slopes = drawn(100, 100)
    options = options_of(kind, 100) | {"key_mask": torch.arange(100).expand(2, -1) % 7 != 3}
    clean = alibi_attention(q, k, v, slopes, backend=backend, **options)
    k[:, :, 3::7], v[:, :, 3::7] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    spoiled = alibi_attention(*leaves, slopes, backend=backend, **options)
    assert torch.equal(clean, spoiled)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(spoiled.sum(), leaves))


def test_a_head_that_never_looks_right_ignores_nan_there() -> None:
    q, k, v, slopes = drawn(90, 90)
    k[:, :, 80] = math.nan
    right = torch.tensor([math.inf, math.inf, 0.3, 0.3], requires_grad=True)
    output = alibi_attention(q, k, v, slopes, causal=False, right_slopes=right, positions=stamps(90), backend="native")
    assert bool(output[:, :2, :80].isfinite().all())
    assert bool(output[:, 2:, :80].isnan().any())
    clean = alibi_attention(
        q, k.nan_to_num(), v, slopes, causal=False, right_slopes=right, positions=stamps(90), backend="native"
    )
    assert torch.autograd.grad(clean.sum(), right)[0][:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", dropout_oracle.PARTS)
def test_parts_have_the_mask_of_the_definition(kind: str) -> None:
    """Also where `merging.py` reverses the keys to the right, or sorts queries in among the keys."""
    for backend in ("reference", "dense", "native"):
        found, defined = dropout_oracle.masks_of_part(kind, backend)
        assert torch.equal(found, defined), backend


def test_a_mask_of_reversed_keys_is_detected() -> None:
    found, defined = dropout_oracle.masks_of_part("prefix", "native")
    seen = found | defined
    assert not torch.equal(found.flip(-1) & seen, defined)


def test_dropped_weights_depend_on_absolute_positions_only() -> None:
    """The later queries alone drop what they drop with all others, also to their right."""
    q, k, v, slopes = drawn(90, 90)
    options = {"prefix_len": torch.tensor([50, 90]), "dropout_p": 0.4, "window": [20, 90, 33, 90], "sinks": 5}
    torch.manual_seed(5)
    whole = alibi_attention(q, k, v, slopes, **options)
    torch.manual_seed(5)
    some = alibi_attention(q[:, :, 37:], k, v, slopes, query_offset=37, **options)
    torch.testing.assert_close(some, whole[:, :, 37:], rtol=0, atol=5e-6)


def test_explain_and_head_reach_count_what_the_parts_read() -> None:
    q, k, v = (torch.randn(2, 4, 1024, 16, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    plain = explain(q, k, v, SLOPES, backend="native")
    prefix = explain(q, k, v, SLOPES, backend="native", prefix_len=torch.tensor([256, 512]))
    assert prefix.call.endswith("causal, prefix")
    extra = (prefix.scores - plain.scores) / plain.scores  # the prefix adds its own keys to the right, and nothing else
    assert bool((extra[0] < 0.35).all())
    assert bool((extra[1] < 0.65).all())
    assert bool((extra > 0).all())
    local = explain(q, k, v, SLOPES, backend="native", window=[64, 64, 5000, 5000], sinks=4)
    assert "a window per head, 4 sinks" in local.call
    assert local.visible == 2 * sum(
        int(x)
        for x in seen_and_bias(q[:1], k[:1], torch.tensor(SLOPES), window=[64, 64, 5000, 5000], sinks=4)[0].sum(
            (0, 2, 3)
        )
    )
    timed = explain(q, k, v, SLOPES, backend="native", positions=torch.arange(1024.0).expand(2, -1))
    assert timed.share < 1.5 * plain.share
    reach = head_reach(q, k, SLOPES, backend="native", prefix_len=torch.tensor([256, 512]))
    assert reach.tolist() == prefix.reaches.tolist()
    assert head_reach(q[:, :, :50], k[:, :, :50], SLOPES, window=[3, 8, 50, 60]).tolist() == [[3, 8, 50, 50]] * 2


def test_explain_says_why_a_backend_cannot_merge_parts() -> None:
    inputs = drawn(90, 90)
    verdicts = explain(*inputs, prefix_len=torch.tensor([3, 4])).verdicts
    assert "FlexAttention has no lse on the CPU" in verdicts["flex"]
    assert verdicts["native"].startswith("cannot") == (build.why_not() is not None)


def test_more_sinks_than_a_prefix_and_queries_before_all_keys() -> None:
    inputs = drawn(60, 100)
    for offset in (-20, 0, 30):
        options = {"prefix_len": torch.tensor([3, 8]), "window": 9, "sinks": 20, "query_offset": offset}
        assert_equal_to_truth(inputs, options, backend="native", error=5e-6)
