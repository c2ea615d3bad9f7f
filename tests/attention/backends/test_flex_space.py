"""FlexAttention in the plane and in space: its functions and block mask against the definition, and the choice of it on CUDA."""

import pytest
import torch
from attention_calls import Watched
from space_oracle import definition, points
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from alibi_attn import alibi_attention, explain
from alibi_attn.attention.backends import flex
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.boxes import blocks_in_space
from alibi_attn.attention.run import dispatch, space
from alibi_attn.attention.run.space import sorted_in_space

N = 700


def rows(query_len: int = N, key_len: int = N, batch: int = 1, heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, heads, query_len, 16), *torch.randn(2, batch, heads // 2, key_len, 16)]


@pytest.mark.parametrize(
    ("kind", "query_len", "axes"),
    [("random", N, 2), ("far", N, 3), ("clusters", N, 2), ("one point", 90, 2), ("grid", 300, 3)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_its_functions_and_block_mask_give_the_definition(kind, query_len, axes, masked, monkeypatch):
    monkeypatch.setattr(flex, "_compiled", flex_attention.flex_attention)
    monkeypatch.setattr(
        flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )  # its formula, operator by operator
    q, k, v = rows(query_len, batch=2)
    slopes, of_key = torch.tensor([2.0, 0.5, 0.01, 0.0]), points(kind, 2, N, axes, 400.0)
    of_query = of_key if query_len == N else points(kind, 2, query_len, axes)
    mask, segments = None, None
    if masked:
        mask = torch.rand(2, N) < 0.7
        segments = torch.randint(0, 3, (2, query_len)), torch.randint(0, 3, (2, N))
        segments = (segments[1], segments[1]) if query_len == N else segments
    given = {"positions": of_key, "key_mask": mask, "segment_ids": segments, "causal": False}
    given |= {} if query_len == N else {"query_positions": of_query}
    with torch.no_grad():
        found = alibi_attention(q, k, v, slopes, backend="flex", **given)
        wide = [x.double() for x in (q, k, v, slopes)]
        expected, _ = definition(*wide, of_query, of_key, key_mask=mask, segments=segments)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    if kind in ("random", "far") and query_len == N:
        assert explain(q, k, v, slopes, backend="flex", **given).share < 1.0


def assert_left_out_obeys_the_rule(spec, q: Tensor, k: Tensor, needed: Tensor) -> float:
    """The shares of blocks left out, in fp64 and against tolerance / (2·(d + 64)); returns the part that was left out."""
    wide = [x.double() for x in (q, k, k)]
    scores = wide[0] @ wide[1].repeat_interleave(spec.group, 1).mT * spec.scale
    scores = (
        scores - spec.slopes.double()[:, None, None] * torch.cdist(spec.query_coordinates, spec.coordinates)[:, None]
    )
    weights = torch.nn.functional.pad(scores.softmax(-1), (0, -N % 128, 0, -N % 128))
    of_blocks = weights.unflatten(-1, (-1, 128)).unflatten(2, (-1, 128)).sum(-1).amax(3)
    at = torch.arange(needed.shape[-1]) * 128
    tokens = ((at[:, None] - at).abs() - 127).clamp(min=0)
    assert bool((needed | (of_blocks <= spec.tolerance / (2 * (tokens + 64)))).all())
    return float((~needed).double().mean())


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_what_is_left_out_obeys_the_key_rule(scale):
    q, k, v = rows()
    k[:, :, 5] *= 9  # an outlier
    spec = make_spec(
        q * scale, k, v, [3.0, 1.0, 0.3, 0.0], causal=False, positions=points("random", 1, N, 2, 400.0), tolerance=1e-4
    )
    spec, q, k, v, _ = sorted_in_space(spec, q * scale, k, v)
    needed = blocks_in_space(spec, q, k, v, 128)
    assert 0.1 < assert_left_out_obeys_the_rule(spec, q, k, needed) < 0.9
    assert bool(needed[:, 3].all())  # without a slope
    with pytest.raises(AssertionError):
        assert_left_out_obeys_the_rule(spec, q, k, torch.zeros_like(needed))


@pytest.mark.parametrize("change", ["nothing", "dropout_p", "key_bias", "slopes"])
def test_on_cuda_it_is_chosen_and_what_it_cannot_goes_by_rows(change, monkeypatch):
    """The choice is that on CUDA, of fake numbers; the sizes are those of the same call on the CPU, with small chunks."""
    calls = []

    def attention(query, *_, block_mask, **__):
        calls.append(block_mask.shape)
        return query + 0.0

    def given(device: str) -> tuple[list[Tensor], dict]:
        rows = [torch.ones(1, 2, N, 16, device=device) for _ in range(3)]
        options = {"causal": False, "positions": torch.ones(1, N, 2, device=device)}
        options |= {"key_bias": torch.ones(N, device=device)} if change == "key_bias" else {}
        options |= {"dropout_p": 0.1} if change == "dropout_p" else {}
        return [*rows, torch.ones(2, device=device, requires_grad=change == "slopes")], options

    with FakeTensorMode():
        rows, options = given("cuda")
        spec = make_spec(*rows, **options)
        assert dispatch.choose("auto", spec, *rows[:3]).name == ("flex" if change == "nothing" else "dense")
    monkeypatch.setattr(flex, "_compiled", attention)
    monkeypatch.setattr(space, "MOST_SCORES", 2 * N * 100)
    monkeypatch.setitem(dispatch.PREFERRED, "cpu", dispatch.PREFERRED["cuda"])
    rows, options = given("cpu")
    with Watched() as watched:
        output = alibi_attention(*rows, **options)
        if change == "slopes":
            output.square().sum().backward()
    assert calls == ([(1, 2, N, N)] if change == "nothing" else [])
    # A chunk of 100 queries, or blocks of 128 queries, each with its near block.
    assert watched.largest <= 2 * 768 * 128 < 2 * N * N / 4
