"""Facts of the contract that hold on every backend, and the errors for wrong arguments."""

import math

import numpy as np
import pytest
import torch
from attention_calls import Watched
from attention_checks import ON_CPU

from alibi_attn import alibi_attention, alibi_bias, alibi_slopes, explain, head_reach
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate import bounds

every_backend = pytest.mark.parametrize("backend", ON_CPU)


def draw(b=2, h=4, k=None, t=50, s=None, d=8, dtype=torch.float64, requires_grad=False):
    k, s = k or h, s or t
    tensors = [torch.randn(b, heads, length, d, dtype=dtype) for heads, length in ((h, t), (k, s), (k, s))]
    return [x.requires_grad_(requires_grad) for x in tensors]


def test_the_bias_is_typed_out() -> None:
    inf = math.inf
    causal = torch.tensor([[0, -inf, -inf], [-0.5, 0, -inf], [-1, -0.5, 0]])
    symmetric = torch.tensor([[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]])
    assert torch.equal(alibi_bias([0.5], 3)[0], causal)
    assert torch.equal(alibi_bias([0.5], 3, causal=False)[0], symmetric)
    assert torch.equal(alibi_bias([0.5], 3, causal=False, right_slopes=[inf])[0], causal)
    assert torch.equal(alibi_bias([0.5], 1, 3)[0], torch.tensor([[-1.0, -0.5, 0.0]]))
    assert torch.equal(alibi_bias([0.5], 2, 3, query_offset=0)[0], causal[:2])
    assert alibi_bias(alibi_slopes(12), 5, 9).shape == (12, 5, 9)
    assert alibi_bias([0.5], 3, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert alibi_bias([0.5], np.int64(3)).shape == (1, 3, 3)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_auto_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    q, k, v = draw(h=6, t=700, dtype=torch.float32)
    out = torch.compile(alibi_attention, fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, alibi_attention(q, k, v))


WAYS_OF_SLOPES = [None, [0.5, 0.25], (1, 0), np.array([0.5, 0.25]), np.full((2, 2), 0.5)]
WAYS_OF_CALLS = [{"causal": False, "right_slopes": [0.5, math.inf]}, {"key_mask": True}, {"segment_ids": True}]


@pytest.mark.parametrize(
    ("slopes", "options"),
    [*((slopes, {}) for slopes in WAYS_OF_SLOPES), *(([0.5, 0.25], options) for options in WAYS_OF_CALLS)],
    ids=repr,
)
def test_nothing_goes_to_a_device_or_comes_from_it(slopes: object, options: dict) -> None:
    """A transfer would synchronize with the GPU in every call. A meta tensor stands in for a device's."""
    tensors = draw(2, 2, t=300, dtype=torch.float32)
    query, key, value = (x.to("meta") for x in tensors)
    for name, dtype in (("key_mask", torch.bool), ("segment_ids", torch.int64)):
        if name in options:
            options = {name: torch.empty(2, 300, dtype=dtype, device="meta")}

    def calls() -> None:
        spec = make_spec(query, key, value, slopes, **options)
        for refine in (True, False):
            bounds.bounds(spec, query, key, value, refine=refine)
        for backend in ("dense", "reference"):
            alibi_attention(query, key, value, slopes, **options, backend=backend)

    calls()  # numbers go there once
    with Watched() as asked:
        calls()
    assert len(asked.names) > 100
    assert not [name for name in asked.names if "lift_fresh" in name or "_local_scalar_dense" in name]


def test_cached_slopes_do_not_change_with_the_array_of_a_caller() -> None:
    """Neither inference mode nor writing to the caller's array changes them; a compiled graph has no constant."""
    slopes = np.array([0.5, 0.25, 0.125, 0.75])
    tensors = draw()
    with torch.inference_mode():
        before = alibi_attention(*tensors, slopes)
    slopes *= 0
    flat = alibi_attention(*tensors, slopes)
    assert not torch.equal(flat, before)
    slopes += [0.5, 0.25, 0.125, 0.75]
    again = alibi_attention(*[x.requires_grad_() for x in tensors], slopes)
    assert torch.equal(again, before)
    again.sum().backward()
    graphs = []

    def seen(graph, _inputs):
        graphs.append(graph)
        return graph

    torch.compile(lambda *x: alibi_attention(*x, backend="dense"), fullgraph=True, backend=seen)(*tensors)
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert not [name for name in called if "as_tensor" in name or "built-in method tensor" in name]


def test_head_reach_is_what_is_read() -> None:
    q, k, v = draw(b=1, h=4, t=1024, dtype=torch.float32, requires_grad=True)
    slopes = [4.0, 1.0, 0.25, 0.001]
    reach = head_reach(q, k, slopes, backend="banded")[0].tolist()
    assert reach[0] < reach[1] < reach[2] < 1024 == reach[3]
    out = alibi_attention(q, k, v, slopes, backend="banded")
    for h in range(4):
        (grad,) = torch.autograd.grad(out[0, h, -1].sum(), v, retain_graph=True)
        touched = grad[0, h].abs().sum(-1).nonzero()
        assert 1024 - int(touched.min()) <= reach[h]
    assert head_reach(q, k, slopes, backend="dense").tolist() == [[1024] * 4]
    assert int(head_reach(q, k, slopes, window=30, backend="banded").max()) == 30


def test_explain_shows_which_backend_runs_and_why() -> None:
    q, k, v = draw(h=8, t=2048, b=1, d=16, dtype=torch.float32)
    words = str(explain(q, k, v))
    first = "native" if native.why_not(make_spec(q, k, v), q, k, v) is None else "banded"
    assert f"{first}     runs (picked by auto)" in words
    assert f"({'tiles round up; ' if explain(q, k, v).share > 0.5 else ''}the masks alone leave 50.0%)" in words
    assert "(tiles round up; the masks alone leave 0.1%)" in str(explain(q, k, v, window=3))
    assert "certified" in words
    short = str(explain(q[:, :, :64], k[:, :, :64], v[:, :, :64]))
    assert "dense      runs (picked by auto)" in short
    assert "auto takes dense instead: short input" in short
    assert "auto takes dense instead: T ≤ 8: dense" in str(explain(q[:, :, :8], k, v))
    assert "cannot: it does not compute dropout_p" in str(explain(q, k, v, dropout_p=0.1))
    assert "dense      runs (named by the caller)" in str(explain(q, k, v, backend="dense"))
