"""Sink logits: in decoding, packed sequences, parts and torch's transforms; the fuzz compares plain calls with fp64."""

import math

import torch

from alibi_attn.attention.api import alibi_attention, explain
from alibi_attn.attention.run.execution import scaled_by_sinks
from alibi_attn.attention.run.merging import merged

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


def test_results_over_parts_of_the_keys_merge_and_get_the_sink_once() -> None:
    q, k, v, m, sinks = drawn(30, 90)
    near, far = ((k[:, :, part], v[:, :, part]) for part in (slice(40, None), slice(0, 40)))
    here = alibi_attention(q, *near, m, query_offset=20, return_lse=True)
    there = alibi_attention(q, *far, m, query_offset=60, return_lse=True)
    output, lse = merged(*here, *there)
    whole = alibi_attention(q, k, v, m, sink_logits=sinks)
    torch.testing.assert_close(scaled_by_sinks(output, lse, sinks), whole, rtol=1e-5, atol=1e-5)


def test_explain_mentions_sinks_and_what_they_exclude() -> None:
    q, k, v, m, sinks = drawn(300, 300)
    explanation = explain(q, k, v, m, sink_logits=sinks)
    assert "sink logits" in explanation.call
    assert explanation.verdicts["flex"] == "cannot: FlexAttention has no lse on the CPU"
    assert "sink" not in str(explain(q, k, v, m))
