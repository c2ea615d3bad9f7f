"""docs/switching.md is true: a block of the common tutorial is loaded as it says, and computes the same."""

from pathlib import Path

import torch
from torch import nn

from alibi_attn import (
    ALiBiTransformerBlock,
    KVCache,
)


class TutorialAttention(nn.Module):
    """The common tutorial's layer, with a buffer of −m·(i − j) for max_seq_len tokens and separate projections."""

    def __init__(self, d_model: int, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        slopes = torch.tensor([2.0 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)])
        at = torch.arange(max_seq_len)
        self.register_buffer("alibi", slopes[:, None, None] * (at - at[:, None]))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        length = x.shape[1]
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.alibi[:, :length, :length]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TutorialBlock(nn.Module):
    """Its block, with biases everywhere but in attention."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, max_seq_len: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = TutorialAttention(d_model, num_heads, max_seq_len)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Dropout(0.1), nn.Linear(d_ff, d_model))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def test_tutorial_block_loads_as_on_the_page():
    torch.manual_seed(0)
    theirs = TutorialBlock(64, 8, 256, 128).eval().double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    page = (Path(__file__).parent.parent / "docs" / "switching.md").read_text(encoding="utf-8")
    recipe = page[page.index("block = ALiBiTransformerBlock(64") : page.index("One linear layer for all three")]
    names = {"of_block": theirs.state_dict(), "torch": torch, "ALiBiTransformerBlock": ALiBiTransformerBlock}
    exec(recipe.split("```")[0], names)
    block, x = names["block"].eval().double(), torch.randn(2, 20, 64, dtype=torch.float64)
    block.load_state_dict(names["state"])  # in fp64
    outputs, gradients = [], []
    for model in (theirs, block):
        given = x.clone().requires_grad_()
        outputs.append(model(given))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), given)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    cache = KVCache()
    with torch.no_grad():
        steps = [block(part, cache=cache) for part in (x[:, :18], x[:, 18:19], x[:, 19:])]
    torch.testing.assert_close(torch.cat(steps, 1), outputs[0].detach(), rtol=0, atol=1e-6)
