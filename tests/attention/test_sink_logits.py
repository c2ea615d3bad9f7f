"""Sink logits: in decoding, packed sequences, parts and torch's transforms; the fuzz compares plain calls with fp64."""

import math

import pytest
import torch

from alibi_attn.attention.api import alibi_attention, explain
from alibi_attn.attention.run.execution import scaled_by_sinks
from alibi_attn.attention.run.merging import merged
from alibi_attn.attention.varlen import alibi_attention_varlen

SINKS = [0.0, 3.0, -4.0, -math.inf]
SLOPES = [0.5, 0.25, 0.1, 0.02]


def drawn(t=70, s=90, *, dtype=torch.float32, heads=4, kv_heads=2, d=16):
    g = torch.Generator().manual_seed(t + s)
    q, k, v = (torch.randn(2, h, n, d, generator=g).to(dtype) for h, n in ((heads, t), (kv_heads, s), (kv_heads, s)))
    return q, k, v, torch.tensor(SLOPES), torch.tensor(SINKS)


def test_a_sink_of_minus_infinity_changes_no_bit() -> None:
    q, k, v, m, _ = drawn(200, 200)
    none = torch.full((4,), -math.inf)
    assert torch.equal(alibi_attention(q, k, v, m, sink_logits=none), alibi_attention(q, k, v, m, return_lse=True)[0])


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_packed_sequences_with_sinks_equal_single_ones(backend: str) -> None:
    _, _, _, m, sinks = drawn()
    q, k, v = (torch.randn(500, 4, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    lengths = torch.tensor([0, 130, 130, 500], dtype=torch.int32)
    packed = alibi_attention_varlen(q, k, v, lengths, m, sink_logits=sinks, backend=backend)
    for low, high in ((0, 130), (130, 500)):
        q_one, k_one, v_one = (x[low:high].transpose(0, 1)[None] for x in (q, k, v))
        alone = alibi_attention(q_one, k_one, v_one, m, sink_logits=sinks, backend=backend)
        torch.testing.assert_close(packed[low:high], alone[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_results_over_parts_of_the_keys_merge_and_get_the_sink_once() -> None:
    q, k, v, m, sinks = drawn(30, 90)
    near, far = ((k[:, :, part], v[:, :, part]) for part in (slice(40, None), slice(0, 40)))
    here = alibi_attention(q, *near, m, query_offset=20, return_lse=True)
    there = alibi_attention(q, *far, m, query_offset=60, return_lse=True)
    output, lse = merged(*here, *there)
    whole = alibi_attention(q, k, v, m, sink_logits=sinks)
    torch.testing.assert_close(scaled_by_sinks(output, lse, sinks), whole, rtol=1e-5, atol=1e-5)


def test_vmap_and_func_grad_agree_with_autograd() -> None:
    q, k, v, m, sinks = drawn(20, 20)

    def loss(sinks, q):
        return alibi_attention(q, k, v, m, sink_logits=sinks, backend="native").square().sum()

    of_sinks, of_q = torch.func.grad(loss, (0, 1))(sinks[:3].new_tensor([0.0, 3.0, -4.0, 1.0]), q)
    leaves = [torch.tensor([0.0, 3.0, -4.0, 1.0], requires_grad=True), q.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close((of_sinks, of_q), expected)
    many = torch.stack([leaves[0].detach(), leaves[0].detach() + 1])
    mapped = torch.func.vmap(lambda x: alibi_attention(q, k, v, m, sink_logits=x))(many)
    torch.testing.assert_close(mapped[1], alibi_attention(q, k, v, m, sink_logits=many[1]))


def test_second_derivatives_of_sinks_alone_are_refused() -> None:
    q, k, v, slopes, sinks = drawn()
    sinks.requires_grad_()
    output = alibi_attention(q, k, v, slopes, sink_logits=sinks)
    (first,) = torch.autograd.grad(output.sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()
    twice = torch.func.grad(torch.func.grad(lambda s: alibi_attention(q, k, v, slopes, sink_logits=s.expand(4)).sum()))
    with pytest.raises(RuntimeError, match="differentiable once"):
        twice(torch.tensor(0.5))


def test_compiled_code_gives_the_same_gradients() -> None:
    q, k, v, m, sinks = drawn(150, 150)

    def ours(q, k, v, m, sinks):
        return alibi_attention(q, k, v, m, sink_logits=sinks, return_lse=True, backend="native")

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (q, k, v, m, sinks)]
    results = [f(*leaves) for f in (ours, compiled)]
    found = [torch.autograd.grad(out.sin().sum() + lse.sum(), leaves) for out, lse in results]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_autocast_leaves_sinks_alone() -> None:
    q, k, v, m, _ = drawn(40, 40)
    precise = torch.tensor([0.123456789, 1.0, 2.0, 3.0])
    with torch.autocast("cpu", torch.bfloat16):
        inside = alibi_attention(q, k, v, m, sink_logits=precise)
    low = [x.bfloat16() for x in (q, k, v)]
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, alibi_attention(*low, m, sink_logits=precise))


def test_explain_mentions_sinks_and_what_they_exclude() -> None:
    q, k, v, m, sinks = drawn(300, 300)
    explanation = explain(q, k, v, m, sink_logits=sinks)
    assert "sink logits" in explanation.call
    assert explanation.verdicts["flex"] == "cannot: FlexAttention has no lse on the CPU"
    assert "sink" not in str(explain(q, k, v, m))
