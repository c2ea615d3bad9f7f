"""The CPU backends: the keys they read, the memory they use, and pitfalls of torch's operator under `banded`."""

import pytest
import torch
from measured_attack import sections_at_every_length

from alibi_attn import alibi_attention, explain, head_reach
from alibi_attn.attention.backends.banded import backend as banded
from alibi_attn.attention.backends.banded import pieces as banded_pieces
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate import bounds

both = pytest.mark.parametrize("backend", ["banded", "native"])


def draw(h=4, t=1500, d=16, dtype=torch.float32, b=1, requires_grad=False):
    return [torch.randn(b, h, t, d, dtype=dtype).requires_grad_(requires_grad) for _ in range(3)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Scores that torch's operator computes: pairs of a query row and a key row."""
    count = {"forward": 0, "backward": 0}

    def wrap(name: str, function, where: int):
        def call(*args, **kwargs):
            query, key = args[where], args[where + 1]
            blocks, rows, keys = query.shape[0], query.shape[2], key.shape[2]
            causal = args[4] if name == "forward" else args[7]
            count[name] += blocks * (rows * (rows + 1) // 2 if causal else rows * keys)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(banded, "_fused", wrap("forward", banded._fused, 0))
    monkeypatch.setattr(banded, "_fused_backward", wrap("backward", banded._fused_backward, 1))
    return count


def test_the_scores_computed_are_those_of_the_certificate(counted: dict[str, int]) -> None:
    q, k, v = draw(requires_grad=True)
    slopes = [2.0, 0.5, 0.1, 0.02]
    out = alibi_attention(q, k, v, slopes, backend="banded")
    out.sum().backward()
    spec = make_spec(q, k, v, slopes)
    with torch.no_grad():
        found = bounds.bounds(spec, q, k, v)
        scores = banded.visits(spec, q, k, v).scores
    assert counted["forward"] == counted["backward"] == int(scores.sum())
    assert f"scores computed: {counted['forward']:,} " in str(explain(q, k, v, slopes, backend="banded"))
    # The scores that each block of 64 queries must read, plus those that the plan's blocks add: a fraction of all.
    start = torch.arange(0, 1500, bounds.TILE)
    asked = torch.minimum(found.left[0] + bounds.TILE, start + bounds.TILE) * bounds.TILE
    assert counted["forward"] <= 1.35 * int(asked.sum())
    assert counted["forward"] < 0.5 * 4 * 1500 * 1501 / 2


def test_a_backend_that_computes_everything_is_detected(counted: dict[str, int]) -> None:
    q, k, v = draw()
    alibi_attention(q, k, v, [2.0, 0.5, 0.1, 0.02], tolerance=0.0, backend="banded")
    assert counted["forward"] >= 4 * 1500 * 1501 / 2


@pytest.mark.parametrize("causal", [True, False])
def test_backward_computes_the_measured_scores_that_explain_shows(counted: dict[str, int], causal: bool) -> None:
    q, k, v = draw(t=900)
    q, k, v = (x.requires_grad_() for x in (3 * q, k, v))
    with sections_at_every_length():
        alibi_attention(q, k, v, [1.0, 0.5, 0.2, 0.1], causal=causal, backend="banded").sum().backward()
        found = explain(q, k, v, [1.0, 0.5, 0.2, 0.1], causal=causal, backend="banded")
    assert counted["backward"] == found.measured_scores.sum() < 0.98 * found.scores.sum()
    assert (found.measured_reaches <= found.reaches).all()
    share = found.measured_scores.sum() / found.scores.sum()
    assert f"it computes {share:.1%} of them, with the same bound" in str(found)


@both
def test_far_keys_are_never_touched(backend: str) -> None:
    q, k, v = draw(h=1, t=900)
    reach = int(head_reach(q, k, [1.0], backend=backend))
    before = alibi_attention(q[:, :, -1:], k, v, [1.0], backend=backend)
    far = torch.arange(900) < 900 - reach
    k2 = torch.where(far[:, None], -k, k)
    v2 = torch.where(far[:, None], 3 * v, v)
    assert torch.equal(alibi_attention(q[:, :, -1:], k2, v2, [1.0], backend=backend), before)


@both
def test_a_giant_far_value_widens_the_reach(backend: str) -> None:
    q, k, v = draw(h=1, t=600, dtype=torch.float64)
    v[:, :, 10] *= 1e12
    exact = alibi_attention(q, k, v, [0.25], tolerance=0.0, backend="reference")
    got = alibi_attention(q, k, v, [0.25], tolerance=1e-8, backend=backend)
    near = exact[:, :, 300:].abs().amax()
    assert float((got - exact)[:, :, 300:].abs().max()) <= 1e-6 * float(near)


@both
def test_left_out_gradients_stay_within_their_bounds(backend: str) -> None:
    """docs/maths.md, step 6, in fp64 against the full definition, with a tolerance large enough to have an effect."""
    tolerance = 1e-3
    q, k, v = draw(h=2, t=700, dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64, requires_grad=True)
    leaf = [q, k, v, slopes]
    go = torch.randn(1, 2, 700, 16, dtype=torch.float64)
    exact = alibi_attention(*leaf, backend="reference")
    got = alibi_attention(*leaf, tolerance=tolerance, backend=backend)
    full, ours = torch.autograd.grad(exact, leaf, go), torch.autograd.grad(got, leaf, go)
    exact, got = exact.detach(), got.detach()
    longest_v, longest_k = v.detach().norm(dim=-1).max(), k.detach().norm(dim=-1).max()
    per_query = 2 * tolerance * go.norm(dim=-1) * longest_v * 16**-0.5 * longest_k
    assert bool(((full[0] - ours[0]).norm(dim=-1) <= 2 * per_query).all())
    assert float((full[2] - ours[2]).norm(dim=-1).max()) > 0, "nothing was left out: the test sees nothing"
    # Σ p_ij over the queries that dropped j is at most ε(1 − e^(−m)) per query, geometric in the distance: ≤ ε·n.
    dropped = tolerance * go.norm(dim=-1).sum(-1)
    assert bool(((full[2] - ours[2]).norm(dim=-1).amax(-1) <= dropped).all())
    reach = head_reach(q, k, slopes, tolerance=tolerance, backend=backend)[0]
    spread = (2 * go.norm(dim=-1) * longest_v).sum(-1)[0]
    assert bool(((full[3] - ours[3]).abs() <= tolerance * (reach + 1 / slopes.detach()) * spread).all())
    assert float((got - exact).norm(dim=-1).max()) <= 2 * tolerance * float(longest_v)


@both
@pytest.mark.parametrize("size", [1.0, 1e160])
def test_float64_keeps_its_digits_when_values_are_huge(size: float, backend: str) -> None:
    """Values too large for torch's operator take another path, which must not round slopes to fp32."""
    results, (q, k, v) = [], (x.double().requires_grad_() for x in draw(t=300))
    for name in ("reference", backend):
        out = alibi_attention(q, k, v * size, [0.7, 0.3, 0.1, 0.03], scale=0.1, backend=name)
        results.append([out / size, *(x / size for x in torch.autograd.grad(out.sum(), [q, k]))])
    for exact, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@both
def test_long_input_needs_linear_memory(backend: str) -> None:
    """n×n scores of one head at 16,384 tokens would be 1 GiB; the whole call allocates a small part of that."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = draw(h=1, t=16384, d=8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        alibi_attention(q, k, v, [0.5], backend=backend)
    largest = max(event.self_cpu_memory_usage for event in trace.events())
    assert 0 < largest < 2**26


def test_bands_that_are_cut_into_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with more than MAX_KEYS keys are split, and the parts merged: tiles, rectangles and shared edges."""
    q, k, v = draw(t=1300, dtype=torch.float64, requires_grad=True)
    slopes = [2.0, 0.3, 0.02, 0.0]
    go = torch.randn_like(q)
    for causal in (True, False):
        results = []
        for most in (banded_pieces.MAX_KEYS, 100):
            monkeypatch.setattr(banded_pieces, "MAX_KEYS", most)
            out, lse = alibi_attention(q, k, v, slopes, causal=causal, return_lse=True, backend="banded")
            results.append([out, lse, *torch.autograd.grad(out, [q, k, v], go)])
        monkeypatch.undo()
        for whole, parts in zip(*results, strict=True):
            torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("backend", ["dense", "banded", "native", "reference"])
def test_the_reach_is_true_of_queries_beyond_the_keys(backend: str) -> None:
    """`reach` is a distance that no pair reaches, even if the nearest key is far away."""
    q, k, v = draw(h=1, t=256)
    for options in (
        {"query_offset": 1024},
        {"query_offset": -700, "causal": False},
        {"query_offset": torch.tensor([90, -3])},
    ):
        batch = 2 if isinstance(options["query_offset"], torch.Tensor) else 1
        inputs = [x.expand(batch, -1, -1, -1) for x in (q, k, v)]
        reach = head_reach(*inputs[:2], [0.001], backend=backend, **options)
        first = torch.as_tensor(options["query_offset"]).reshape(-1)
        largest = torch.maximum(first + 255, 255 - first if not options.get("causal", True) else first)
        assert torch.equal(reach[:, 0], (largest + 1).expand(batch))
        windowed = head_reach(*inputs[:2], [0.001], backend=backend, window=200, **options)
        assert bool((windowed[:, 0] <= 200).all())
    assert head_reach(q, k, [0.001], query_offset=-256, backend=backend).tolist() == [[0]]
