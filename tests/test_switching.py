"""docs/switching.md is true: each row of the table computes what the other library computes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn import (
    ALiBiAttention,
    ALiBiPositionalBias,
    ALiBiTransformerBlock,
    KVCache,
    alibi_attention,
    alibi_attention_varlen,
    alibi_slopes,
)


def test_a_buffer_of_biases():
    scores, length = torch.randn(1, 8, 20, 20), 64
    i, j = torch.arange(length)[:, None], torch.arange(length)
    slopes = torch.tensor(alibi_slopes(8), dtype=torch.float32)[:, None, None]
    buffer = (slopes * (j - i)).masked_fill(j > i, float("-inf"))  # registered for lengths up to 64
    assert torch.equal(scores + ALiBiPositionalBias(8)(20), scores + buffer[:, :20, :20])


@pytest.mark.parametrize("window_size", [(-1, -1), (4, 0), (1, 1)])
def test_flash_attn(window_size):
    """flash-attn needs a GPU. Its documented meaning: layout [B, T, H, D], bias −m·|i + S − T − j|, last aligned."""
    q, k, v = torch.randn(2, 3, 8, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    slopes, left = torch.rand(2, 8), window_size[0]
    distance = torch.arange(3)[:, None] + 9 - 3 - torch.arange(9)
    causal, right = window_size[1] <= 0, window_size[1]
    hidden = ((distance < 0) & causal) | ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
    bias = (-slopes[:, :, None, None] * distance.abs()).masked_fill(hidden, float("-inf"))
    many = [x.repeat_interleave(4, dim=2).transpose(1, 2) for x in (k, v)]
    flash = F.scaled_dot_product_attention(q.transpose(1, 2), *many, attn_mask=bias).transpose(1, 2)
    window = None if left < 0 else left + 1
    options = {"window": window} if causal else {"window": window, "causal": False}
    ours = alibi_attention(*(x.transpose(1, 2) for x in (q, k, v)), slopes, **options).transpose(1, 2)
    torch.testing.assert_close(ours, flash, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_varlen(causal):
    """Its documented meaning: sequence b is cu[b] to cu[b + 1] of packed [N, H, D], each with its own bias."""
    q, k, v = torch.randn(12, 8, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    slopes, cu = torch.rand(8), torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    flash = torch.empty_like(q)
    for low, high in zip(cu.tolist(), cu[1:].tolist(), strict=False):
        distance = torch.arange(high - low)[:, None] - torch.arange(high - low)
        bias = -slopes[:, None, None] * distance.abs()
        bias = bias.masked_fill(distance < 0, float("-inf")) if causal else bias
        many = [x[low:high].repeat_interleave(4, dim=1).transpose(0, 1) for x in (k, v)]
        of_query = q[low:high].transpose(0, 1)
        flash[low:high] = F.scaled_dot_product_attention(of_query, *many, attn_mask=bias).transpose(0, 1)
    ours = alibi_attention_varlen(q, k, v, cu, slopes, causal=causal)
    torch.testing.assert_close(ours, flash, rtol=1e-5, atol=1e-6)


def test_masks():
    """A mask of keys [B, 1, 1, S], boolean or 0 and −inf; SDPA is not causal by default."""
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    seen = torch.arange(9) < torch.tensor([9, 5])[:, None, None, None]
    added = torch.zeros(2, 1, 1, 9).masked_fill(~seen, float("-inf"))
    for mask, key_mask in ((seen, seen[:, 0, 0]), (added, added[:, 0, 0] == 0)):
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        ours = alibi_attention(q, k, v, [0.0] * 4, causal=False, key_mask=key_mask)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_multihead_attention():
    theirs = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    ours = ALiBiAttention(32, 4, causal=False, slopes=[0.0] * 4)
    weights = theirs.in_proj_weight.chunk(3)
    ours.load_state_dict(
        {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
        | {"out_proj.weight": theirs.out_proj.weight}
    )
    x, padding = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([9, 5])[:, None]
    expected = theirs(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(ours(x, key_mask=~padding), expected, rtol=1e-5, atol=1e-6)


class TutorialBias(nn.Module):
    """The common tutorial class: distances up to max_seq_len in a buffer, slopes of a power of two."""

    def __init__(self, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        slopes = [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        self.register_buffer("slopes", torch.tensor(slopes).view(num_heads, 1, 1))
        positions = torch.arange(max_seq_len)
        self.register_buffer("distances", (positions[None, :] - positions[:, None]).float()[None])

    def forward(self, length: int) -> Tensor:
        return self.slopes * self.distances[:, :length, :length]

    def get_bias_for_kv_cache(self, query_len: int, kv_len: int) -> Tensor:
        assert query_len == 1
        return self.slopes * (torch.arange(kv_len).float() - (kv_len - 1))[None]


class TutorialAttention(nn.Module):
    """The layer that accompanies it: `o_proj`, `attention_mask`, and a pair of tensors for decoding."""

    def __init__(self, d_model: int, num_heads: int, max_seq_len: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.alibi = TutorialBias(num_heads, max_seq_len)

    def forward(self, x, attention_mask=None, past_key_value=None, use_cache=False):
        heads = [
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        q, k, v = heads
        if past_key_value is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past_key_value, (k, v), strict=True))
            scores = q @ k.mT / q.shape[-1] ** 0.5 + self.alibi.get_bias_for_kv_cache(1, k.shape[2])
        else:
            scores = q @ k.mT / q.shape[-1] ** 0.5 + self.alibi(x.shape[1])
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None] == 0, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        output = self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        return (output, (k, v)) if use_cache else output


NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}


@pytest.fixture
def layers() -> tuple[TutorialAttention, ALiBiAttention]:
    """The tutorial's layer, and ours with its weights, loaded as the page does."""
    torch.manual_seed(0)
    theirs, ours, state = TutorialAttention(64, 8, 128), ALiBiAttention(embed_dim=64, num_heads=8), {}
    for name, tensor in theirs.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if layer in NAMES:
            state[f"{NAMES[layer]}.{kind}"] = tensor
    ours.load_state_dict(state)
    return theirs.eval(), ours.eval()


def test_tutorial_bias():
    theirs, ours = TutorialBias(8, 64), ALiBiPositionalBias(8)
    visible = torch.ones(20, 20).tril().bool()
    torch.testing.assert_close(ours(20)[:, visible], theirs(20)[:, visible])
    torch.testing.assert_close(ours(1, 20), theirs.get_bias_for_kv_cache(1, 20))
    torch.testing.assert_close(torch.tensor(alibi_slopes(8), dtype=torch.float32), theirs.slopes.flatten())


def test_tutorial_layer_with_a_mask(layers):
    theirs, ours = layers
    x, mask = torch.randn(2, 20, 64), (torch.arange(20) < torch.tensor([20, 13])[:, None]).long()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, key_mask=mask.bool()), theirs(x, attention_mask=mask), rtol=1e-4, atol=1e-5)


def test_tutorial_layer_decoding(layers):
    theirs, ours = layers
    x, cache = torch.randn(1, 12, 64), KVCache()
    with torch.no_grad():
        expected, pair = theirs(x[:, :9], use_cache=True)
        torch.testing.assert_close(ours(x[:, :9], cache=cache), expected, rtol=1e-4, atol=1e-5)
        for token in x[:, 9:].split(1, dim=1):
            expected, pair = theirs(token, past_key_value=pair, use_cache=True)
            torch.testing.assert_close(ours(token, cache=cache), expected, rtol=1e-4, atol=1e-5)


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
