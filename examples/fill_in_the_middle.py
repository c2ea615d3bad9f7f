"""How does a model fill a gap when it sees the text on both sides, each token at its true distance?

python examples/fill_in_the_middle.py
"""

import argparse

import torch
from torch import Tensor

from alibi_attn import alibi_attention, alibi_bias, alibi_slopes


def fill(query: Tensor, key: Tensor, value: Tensor, middle: int, suffix: int) -> Tensor:
    """Attention of the gap's queries [B, H, middle, D] to all that precedes each of them, and to the suffix.

    The keys [B, H, S, D] are in the order of the text: prefix, gap, suffix. Two exact calls over disjoint keys merge by lse.
    """
    end = key.shape[2] - suffix
    left, left_lse = alibi_attention(query, key[:, :, :end], value[:, :, :end], return_lse=True)
    right, right_lse = alibi_attention(
        query, key[:, :, end:], value[:, :, end:], causal=False, query_offset=-middle, return_lse=True
    )
    lse = torch.logaddexp(left_lse, right_lse)
    return (left_lse - lse).exp()[..., None] * left + (right_lse - lse).exp()[..., None] * right


def fill_densely(query: Tensor, key: Tensor, value: Tensor, middle: int, suffix: int) -> Tensor:
    """The same with every score written out."""
    length, heads = key.shape[2], query.shape[1]
    first = length - suffix - middle
    at, keys = torch.arange(first, first + middle)[:, None], torch.arange(length)
    visible = (keys <= at) | (keys >= length - suffix)
    bias = alibi_bias(alibi_slopes(heads), length, causal=False)[:, first : first + middle]
    scores = query @ key.mT * query.shape[-1] ** -0.5 + bias
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=4000, help="tokens before the gap, and after it")
length, middle = parser.parse_args().length, 60
torch.manual_seed(0)
query = torch.randn(1, 8, middle, 64)
key, value = torch.randn(2, 1, 8, 2 * length + middle, 64)
filled = fill(query, key, value, middle, length)
difference = (filled - fill_densely(query, key, value, middle, length)).abs().max()
print(f"{middle} tokens between {length:,} and {length:,}: differ by {difference:.0e} from all scores written out")
