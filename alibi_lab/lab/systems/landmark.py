"""Landmark attention: blocks of keys behind gates (Mohtashami and Jaggi 2023, sec. 3.1, arXiv:2305.16300).

Keys are cut into blocks of b tokens, and each complete block has a landmark key. For query i in block B(i)

    gates    softmax over the tokens of B(i) up to i, and over the landmarks of all earlier blocks
    inside   for every earlier block, softmax over its own tokens
    weight   of a token of B(i) its gate; of an earlier token, the gate of its block times its weight inside

so that all weights of a query sum to 1, and a query reads a block as far as it attends to the block's landmark. In tests, as in
the paper's inference, every query and head reads only the `retrieved` blocks with the highest landmark scores.

Differences from the paper: a position method cannot insert tokens, so the last token of a block is its landmark as well. It stays
readable, and a learned matrix per head makes the landmark's key from its key. Distances enter by ALiBi's biases instead of
rotations: −m·(i − j) in the block of the query, −m·(distance to the block's end) inside other blocks, and for landmarks
−m·min(distance, L): as with the paper's positions for old blocks, no landmark is farther away than in training. L is the trained
length, other shapes as in `attention/call/spec.py`; n is the number of blocks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod, published_slopes
from alibi_lab.position_methods import Look


class Landmark(PositionMethod):
    """Grouped softmax with a landmark per block of L/8 tokens, at least 2; computes all pairs, so it costs n² scores.

    Blocks count from the first key that a layer has.
    """

    relative = False  # blocks count from the start of a row
    retrieved = 4  # blocks per query and head in tests
    look = Look("landmarks", "#3f5f8f", "#a3bfe6", "p")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.block = max(2, trained_length // 8)
        self.slopes = published_slopes(config.num_heads)
        size = config.embed_dim // config.num_heads
        self.gate = nn.Parameter(torch.empty(config.num_layers, config.num_heads, size, size))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        gates = self.gate[at.layer.index].to(k.dtype)
        dropout_p = self.config.attention_dropout if self.training else 0.0
        landmarks = k[:, :, self.block - 1 :: self.block] @ gates
        retrieved = at.key_len if self.training else self.retrieved
        weights = grouped_weights(
            q, k, landmarks, self.slopes, at.visible(q.device), self.block, self.trained_length, retrieved
        )
        return F.dropout(weights, dropout_p) @ v


def grouped_weights(
    q: Tensor, k: Tensor, landmarks: Tensor, slopes: Tensor, visible: Tensor, block: int, farthest: int, retrieved: int
) -> Tensor:
    """The weights of all pairs, [B, H, T, S]; rows sum to 1.

    Args:
        landmarks: [B, H, n, D], the keys of the complete blocks.
        visible: [1, 1, T, S]; a block can be read if its last token is visible.
        farthest: no landmark counts as farther away than this, in tokens.
        retrieved: the number of blocks per query and head, or more than there are for all.
    """
    query_len, key_len, scale = q.shape[-2], k.shape[-2], 1 / math.sqrt(q.shape[-1])
    lowest = torch.finfo(q.dtype).min
    keys = torch.arange(key_len, device=q.device)
    queries = keys[key_len - query_len :, None]
    m = slopes.to(q.dtype)[:, None, None]
    own = (queries // block == keys // block) & visible
    ends = (keys // block + 1) * block - 1
    tilt = torch.where(queries // block == keys // block, queries - keys, ends - keys)
    scores = q @ k.mT * scale - m * tilt.to(q.dtype)

    last = ends[block - 1 :: block]
    earlier = (last // block < queries // block) & visible[..., last]
    to_landmarks = q @ landmarks.mT * scale - m * (queries - last).clamp(max=farthest).to(q.dtype)
    to_landmarks = to_landmarks.masked_fill(~earlier, lowest)
    if retrieved < len(last):
        least = to_landmarks.topk(retrieved, -1).values[..., -1:]
        to_landmarks = to_landmarks.masked_fill(to_landmarks < least, lowest)

    gates = torch.cat([scores.masked_fill(~own, lowest), to_landmarks], -1).softmax(-1)
    direct, of_blocks = gates.split([key_len, len(last)], -1)
    whole = len(last) * block  # tokens in complete blocks
    inside = scores.masked_fill(~visible, lowest)[..., :whole].unflatten(-1, (len(last), block)).softmax(-1)
    gated = (of_blocks[..., None] * inside).flatten(-2)
    return direct + F.pad(gated, (0, key_len - whole))
