"""Cross-attention: keys and values from another sequence, without a bias unless slopes are given."""

import pytest
import torch
from layer_oracle import by_formula
from refusals import assert_refused

from alibi_attn import ALiBiAttention, KVCache


def layer_of(**options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(24, 6, **{"kv_dim": 40, **options}).eval()


@pytest.mark.parametrize("slopes", [None, [0.0, 0.1, 1.0, 0.5, 2.0, 0.3]])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("lengths", [(7, 13), (13, 5), (1, 9)])
def test_cross_attention_is_a_softmax_over_all_of_memory(slopes, num_kv_heads, lengths):
    layer = layer_of(slopes=slopes, num_kv_heads=num_kv_heads)
    x = torch.randn(2, lengths[0], 24, requires_grad=True)
    memory = torch.randn(2, lengths[1], 40, requires_grad=True)
    mask = torch.ones(2, lengths[1], dtype=torch.bool)
    mask[0, 3:] = False
    expected = by_formula(layer, x, memory, causal=False, query_offset=0, key_mask=mask).float()
    outputs = layer(x, memory=memory, memory_mask=mask), expected
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    inputs, weight = [x, memory, *layer.parameters()], torch.randn_like(x)
    gradients = [torch.autograd.grad((output * weight).sum(), inputs) for output in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_without_slopes_the_order_of_memory_does_not_matter():
    x, memory = torch.randn(1, 5, 24), torch.randn(1, 30, 40)
    for slopes, same in ((None, True), ([0.5] * 6, False)):
        layer = layer_of(slopes=slopes)
        with torch.no_grad():
            straight, reversed_ = layer(x, memory=memory), layer(x, memory=memory.flip(1))
        assert torch.allclose(straight, reversed_, atol=1e-5) == same


def test_wrong_memory_raises_errors_that_say_what_is_allowed():
    layer, x, memory, mask = layer_of(), torch.randn(2, 5, 24), torch.randn(2, 9, 40), torch.ones(2, 9).bool()
    plain, needs = ALiBiAttention(24, 6), "cross-attention needs kv_dim ≥ 1"
    assert_refused(
        ("memory is missing but this is a cross-attention layer", lambda: layer(x)),
        ("memory is given but this is a self-attention layer", lambda: plain(x, memory=memory)),
        ("memory_mask is given but this is a self-attention layer", lambda: plain(x, memory_mask=mask)),
        (r"must be \[B, S, kv_dim\] = \[2, S, 40\]", lambda: layer(x, memory=memory[..., :39])),
        ("supports no cache", lambda: layer(x, memory=memory, key_mask=mask[:, :5])),
        ("needs causal=True", lambda: layer(x, memory=memory, cache=KVCache())),
        (needs, lambda: layer_of(kv_dim=0)),
        (needs, lambda: layer_of(window=3)),
        (needs, lambda: layer_of(forget_gate=True)),
    )
    assert_refused(
        ("key_mask is float32", lambda: layer(x, memory=memory, memory_mask=mask.float())),
        (r"memory is torch\.float64 but x is torch\.float32", lambda: layer(x, memory=memory.double())),
        error=TypeError,
    )
    assert "kv_dim=40" in repr(layer)
