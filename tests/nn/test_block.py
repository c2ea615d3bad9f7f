"""The transformer block: its formula, its dropout, and that a small stack learns."""

import pytest
import torch
from torch.nn import functional as F

from alibi_attn import ALiBiTransformerBlock


def test_the_block_is_pre_norm():
    torch.manual_seed(0)
    block, x = ALiBiTransformerBlock(24, 6, 40, bias=True, num_kv_heads=2), torch.randn(2, 5, 24)
    first, second = block.ffn[0], block.ffn[3]
    middle = x + block.attention(F.layer_norm(x, (24,), block.attention_norm.weight, block.attention_norm.bias))
    hidden = F.gelu(first(F.layer_norm(middle, (24,), block.ffn_norm.weight, block.ffn_norm.bias)))
    torch.testing.assert_close(block(x), middle + second(hidden))
    assert first.out_features == 40


@pytest.mark.parametrize("bias", [False, True])
def test_bias_is_that_of_every_part(bias):
    block = ALiBiTransformerBlock(24, 6, bias=bias, learn_slopes=True, qk_norm=True)
    assert any("bias" in name for name in block.state_dict()) == bias
    assert block.ffn[0].out_features == 96


def test_dropout_acts_on_both_branches_and_in_training_only():
    torch.manual_seed(0)
    block, x = ALiBiTransformerBlock(24, 6, dropout_p=0.3), torch.randn(1, 5, 24)
    assert block.attention.dropout_p == 0.3
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_mismatched_inputs_are_refused():
    with pytest.raises(ValueError, match="ffn_dim is 0"):
        ALiBiTransformerBlock(24, 6, 0)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        ALiBiTransformerBlock(24, 7)
    with pytest.raises(TypeError, match="positions"):
        ALiBiTransformerBlock(24, 6, positions="rotary")
    with pytest.raises(TypeError, match=r"x is torch\.int64 but .* pass embeddings, not token numbers"):
        ALiBiTransformerBlock(24, 6)(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"x has shape \[2, 5, 6\] but must be \[B, T, 24\]"):
        ALiBiTransformerBlock(24, 6)(torch.zeros(2, 5, 6))
