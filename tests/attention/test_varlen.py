"""Packed sequences: each equals attention of that sequence alone, forward and backward, whatever its neighbors."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np
import pytest
import torch
from attention_cases import Case
from attention_checks import ON_CPU, assert_exact
from attention_oracle import Answer, truth
from torch import Tensor

from alibi_attn import alibi_attention, alibi_attention_varlen, alibi_slopes
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run import dispatch
from alibi_attn.attention.varlen import FEW_SCORES

LENGTHS = (70, 0, 1, 67, 0, 5)  # borders at 70, 71 and 138


class Alone(Case):
    """One of the packed sequences; all of them have the same slopes."""

    def _slopes(self, rng: np.random.Generator) -> np.ndarray:
        return super()._slopes(np.random.default_rng(1))

    def _right(self, rng: np.random.Generator) -> np.ndarray | None:
        return super()._right(np.random.default_rng(2))


CALLS = (
    Alone("causal", heads=4, kv_heads=2, slopes="steep"),
    Alone("symmetric", heads=2, slopes="random", causal=False, scale=0.4),
    Alone("right slopes", heads=4, kv_heads=1, slopes="random", causal=False, right="inf"),
    Alone("window", heads=2, window=40),
    Alone("symmetric window", heads=2, window=3, causal=False),
    Alone("key bias", heads=4, kv_heads=2, slopes="zero", key_bias="of heads"),
)


def alone(call: Case) -> list[Case]:
    """The nonempty sequences, one by one."""
    lengths = [n for n in LENGTHS if n]
    return [dataclasses.replace(call, batch=1, query_len=n, key_len=n, seed=n) for n in lengths]


def bounds() -> Tensor:
    return torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)


def packed(call: Case, dtype: torch.dtype, *, transposed: bool = False) -> dict[str, Tensor]:
    """The arguments of all sequences together, and the incoming gradients; unmodified, or as views of [H, N, D]."""
    drawn = [case.draw() for case in alone(call)]
    found = {}
    for name in ("query", "key", "value", "grad_output"):
        heads_first = torch.cat([torch.tensor(one[name][0], dtype=dtype) for one in drawn], dim=1)
        found[name] = heads_first.transpose(0, 1) if transposed else heads_first.transpose(0, 1).contiguous()
    for name in ("slopes", "right_slopes"):
        if drawn[0][name] is not None:
            found[name] = torch.tensor(drawn[0][name], dtype=dtype)
    if call.key_bias:
        found["key_bias"] = torch.cat([torch.tensor(one["key_bias"], dtype=dtype) for one in drawn], dim=1)
    found["grad_lse"] = torch.cat([torch.tensor(one["grad_lse"][0], dtype=dtype) for one in drawn], dim=1)
    return found


def assert_each_alone(call: Case, dtype: torch.dtype, backend: str, *, transposed: bool = False) -> None:
    """Compares every sequence with the loop over i and j in float64; none passes a gradient to another."""
    given = packed(call, dtype, transposed=transposed)
    leaves = {name: x.requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    options = {"causal": call.causal, "window": call.window, "scale": call.scale, "backend": backend}
    out, lse = alibi_attention_varlen(**leaves, cu_seqlens=bounds(), return_lse=True, **options)
    assert out.shape == given["query"].shape
    at = 0
    for case in alone(call):
        own = slice(at, at := at + case.query_len)
        of_output, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
        of_output[own], of_lse[:, own] = given["grad_output"][own], given["grad_lse"][:, own]
        found = torch.autograd.grad([out, lse], list(leaves.values()), [of_output, of_lse], retain_graph=True)
        gradients = dict(zip(leaves, found, strict=True))
        for name in ("query", "key", "value"):
            whole, gradients[name] = gradients[name], gradients[name][own].transpose(0, 1)[None]
            assert whole.count_nonzero() == gradients[name].count_nonzero(), (
                f"{name} of another sequence has a gradient"
            )
        if call.key_bias:
            gradients["key_bias"] = gradients["key_bias"][:, own]
        assert gradients.keys() == truth(case).gradients.keys()
        assert_exact(
            case, dtype, Answer(out[own].transpose(0, 1)[None].detach(), lse[None, :, own].detach(), gradients)
        )


@pytest.mark.parametrize(
    ("call", "backend"),
    [(call, backend) for call in CALLS for backend in ON_CPU if not (call.key_bias and backend == "banded")],
    ids=str,
)
def test_each_sequence_is_as_alone(call: Case, backend: str) -> None:
    assert_each_alone(call, torch.float32, backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_and_transposed_views(dtype: torch.dtype) -> None:
    assert_each_alone(CALLS[0], dtype, "native", transposed=True)


def test_a_border_off_by_one_is_noticed(monkeypatch) -> None:
    wrong = bounds() - (bounds() == 71).int()
    monkeypatch.setattr(f"{__name__}.bounds", lambda: wrong)
    with pytest.raises(AssertionError):
        assert_each_alone(CALLS[0], torch.float32, "native")


def draw(length: int = 40, heads: int = 4) -> tuple[Tensor, ...]:
    return torch.randn(3, length, heads, 16, generator=torch.Generator().manual_seed(length)).unbind(0)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_sequences_are_computed_one_by_one_where_all_scores_of_the_row_would_be_many(backend: str, monkeypatch) -> None:
    q, k, v = draw(400)
    lengths = []
    run = dispatch.RUNS[backend]
    monkeypatch.setitem(dispatch.RUNS, backend, lambda spec, *x: (lengths.append(spec.key_len), run(spec, *x))[1])
    starts = torch.tensor([0, 150, 150, 400])
    options = {"key_bias": torch.randn(4, 400), "sink_logits": torch.randn(4), "return_lse": True}
    found = alibi_attention_varlen(q, k, v, starts, **options, backend=backend)
    assert lengths == [150, 250]
    expected = alibi_attention_varlen(q, k, v, starts, **options, backend="native")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_packed_row_computes_the_scores_of_its_sequences() -> None:
    """`native` visits the same keys as for separate sequences, except in blocks of 64 that contain a border."""
    lengths = torch.randint(300, 900, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    q, k, v = (x.transpose(0, 1)[None] for x in draw(sum(lengths)))
    of_tokens = torch.repeat_interleave(torch.arange(12), torch.tensor(lengths))[None]
    for causal in (True, False):
        row = dispatch.BACKENDS["native"].visits(make_spec(q, k, v, segment_ids=of_tokens, causal=causal), q, k, v)
        one_by_one, at = 0, 0
        for n in lengths:
            own = [x[:, :, at : at + n] for x in (q, k, v)]
            one_by_one += int(dispatch.BACKENDS["native"].visits(make_spec(*own, causal=causal), *own)[1].sum())
            at += n
        at_borders = 4 * 64 * sum(a + b for a, b in itertools.pairwise(lengths))
        assert one_by_one <= int(row[1].sum()) <= one_by_one + at_borders
        assert one_by_one + at_borders < 0.1 * 4 * sum(lengths) ** 2


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens_give_no_rows(lengths: tuple[int, ...]) -> None:
    leaves = [torch.randn(0, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    out, lse = alibi_attention_varlen(*leaves, starts, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 16), (4, 0))
    out.sum().backward()
    assert leaves[1].grad is not None


def test_nan_stays_in_its_sequence() -> None:
    q, k, v = draw()
    starts = torch.tensor([0, 13, 40])
    clean = alibi_attention_varlen(q, k, v, starts)
    k[5], v[2] = math.nan, math.inf
    assert torch.equal(alibi_attention_varlen(q, k, v, starts)[13:], clean[13:])


def test_one_graph_serves_all_lengths() -> None:
    """The values and the number of cu_seqlens are not part of the graph."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(alibi_attention_varlen, fullgraph=True, dynamic=True, backend=count)
    for starts in ([0, 13, 500], [0, 250, 250, 500], [0, 1, 2, 3, 600]):
        inputs = [x.clone().requires_grad_() for x in draw(starts[-1])]
        bounds = torch.tensor(starts, dtype=torch.int32)
        found, expected = (f(*inputs, bounds, alibi_slopes(4).tolist()) for f in (compiled, alibi_attention_varlen))
        torch.testing.assert_close(found, expected)
        weights = torch.linspace(-1, 1, 16)
        ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_vmap_maps_rows_that_are_packed_alike() -> None:
    many = [torch.stack([x, x.flip(0)]) for x in draw(500)]
    starts = torch.tensor([0, 13, 500])
    found = torch.func.vmap(lambda q, k, v: alibi_attention_varlen(q, k, v, starts))(*many)
    expected = torch.stack([alibi_attention_varlen(q, k, v, starts) for q, k, v in zip(*many, strict=True)])
    torch.testing.assert_close(found, expected)


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = draw(500)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = alibi_attention_varlen(q, k, v, torch.tensor([0, 13, 500]))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["native", "dense", "reference"])
def test_dropout_is_the_same_in_every_backend(backend: Literal["native", "dense", "reference"]) -> None:
    """Also in those that compute long rows sequence by sequence."""
    inputs, starts = draw(900), torch.tensor([0, 200, 200, 900])
    assert inputs[0].shape[1] * 900**2 > FEW_SCORES
    row = (x.transpose(0, 1)[None] for x in inputs)
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor([200, 700]))[None]
    torch.manual_seed(0)
    expected = alibi_attention(*row, segment_ids=segments, dropout_p=0.5, backend="native")[0].transpose(0, 1)
    torch.manual_seed(0)
    found = alibi_attention_varlen(*inputs, starts, dropout_p=0.5, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 9}], ids=["causal", "symmetric", "window"])
def test_positions_restart_with_each_sequence(options) -> None:
    """Timestamps of irregular series, the same for all of them but for where they begin and end."""
    q, k, v = (x.requires_grad_() for x in draw(143))
    times = torch.rand(143, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(5).cumsum(0)
    times[71:] -= 1e6  # earlier than those of the sequence before
    pairs = [(low, high) for low, high in itertools.pairwise(bounds().tolist()) if low < high]
    grad, expected = torch.randn(143, 4, 16), []
    for low, high in pairs:
        rows = [x[low:high].transpose(0, 1)[None] for x in (q, k, v)]
        expected.append(alibi_attention(*rows, positions=times[None, low:high], **options)[0].transpose(0, 1))
    whole = torch.cat(expected)
    gradients = torch.autograd.grad(whole, (q, k, v), grad)
    for backend in ("auto", "native", "dense", "reference"):
        found = alibi_attention_varlen(q, k, v, bounds(), positions=times, backend=backend, **options)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=2e-5)
        for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), grad), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
    indices = alibi_attention_varlen(q, k, v, bounds(), **options)
    assert not torch.allclose(indices, whole, atol=1e-2)
