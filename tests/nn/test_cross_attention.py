"""Cross-attention: keys and values from another sequence, without a bias unless slopes are given."""

import pytest
import torch

from alibi_attn import ALiBiAttention, KVCache


def layer_of(**options: object) -> ALiBiAttention:
    torch.manual_seed(0)
    return ALiBiAttention(24, 6, kv_dim=40, **options).eval()


def by_hand(layer: ALiBiAttention, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax over all of memory, written with einsum."""
    q, k, v = (
        project(source).unflatten(-1, (-1, 4)).transpose(1, 2)
        for project, source in ((layer.q_proj, x), (layer.k_proj, memory), (layer.v_proj, memory))
    )
    k, v = (y.repeat_interleave(6 // layer.num_kv_heads, 1) for y in (k, v))
    distance = (torch.arange(x.shape[1])[:, None] - torch.arange(memory.shape[1])).abs()
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 2 - layer.slopes.values[:, None, None] * distance
    weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    return layer.out_proj(torch.einsum("bhts,bhsd->bhtd", weights, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("slopes", [None, [0.0, 0.1, 1.0, 0.5, 2.0, 0.3]])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("lengths", [(7, 13), (13, 5), (1, 9)])
def test_cross_attention_is_a_softmax_over_all_of_memory(slopes, num_kv_heads, lengths):
    layer = layer_of(slopes=slopes, num_kv_heads=num_kv_heads)
    x = torch.randn(2, lengths[0], 24, requires_grad=True)
    memory = torch.randn(2, lengths[1], 40, requires_grad=True)
    mask = torch.ones(2, lengths[1], dtype=torch.bool)
    mask[0, 3:] = False
    outputs = layer(x, memory=memory, memory_mask=mask), by_hand(layer, x, memory, mask)
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
    layer, x, memory = layer_of(), torch.randn(2, 5, 24), torch.randn(2, 9, 40)
    with pytest.raises(ValueError, match="memory is missing but this is a cross-attention layer"):
        layer(x)
    with pytest.raises(ValueError, match="memory is given but this is a self-attention layer"):
        ALiBiAttention(24, 6)(x, memory=memory)
    with pytest.raises(ValueError, match="memory_mask is given but this is a self-attention layer"):
        ALiBiAttention(24, 6)(x, memory_mask=torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be \[B, S, kv_dim\] = \[2, S, 40\]"):
        layer(x, memory=memory[..., :39])
    with pytest.raises(ValueError, match="supports no cache"):
        layer(x, memory=memory, key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="needs causal=True"):
        layer(x, memory=memory, cache=KVCache())
    with pytest.raises(TypeError, match="key_mask is float32"):
        layer(x, memory=memory, memory_mask=torch.ones(2, 9))
    with pytest.raises(TypeError, match=r"memory is torch\.float64 but x is torch\.float32"):
        layer(x, memory=memory.double())
    for wrong in ({"kv_dim": 0}, {"kv_dim": 8, "window": 3}, {"kv_dim": 8, "forget_gate": True}):
        with pytest.raises(ValueError, match="cross-attention needs kv_dim ≥ 1"):
            ALiBiAttention(24, 6, **wrong)
    assert "kv_dim=40" in repr(layer)
