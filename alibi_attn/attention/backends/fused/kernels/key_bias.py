"""Splits the biases of keys into a base per tile and remainders; see `fused/key_bias.py`."""

# mypy: ignore-errors
# Triton compiles these functions and accepts only its own type annotations.

import triton
import triton.language as tl

from alibi_attn.attention.backends.fused.kernels.tiles import TILE

LN2 = tl.constexpr(0.6931471805599453)
MOST = tl.constexpr(2e38)  # the largest finite bias: in units of log2 it must fit fp32


@triton.jit
def split_kernel(BIAS, split, H, S):
    """Program: one tile of keys of one head; see `split_tile`."""
    tiles = tl.cdiv(S, TILE)
    split_tile(BIAS, split, (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles, H, S)


@triton.jit
def split_tile(BIAS, split, bh, tile, H, S):
    """Splits the biases of one tile of keys. BIAS is Rows [B, H, S, 1]; writes all of KeyBias but `references`.

    Returns (its `rest`, [TILE], −inf past the last key; its base).
    """
    tiles = tl.cdiv(S, TILE)
    j = tile * TILE + tl.arange(0, TILE)
    bias, hidden, base = load_tile(BIAS, bh, tile, H, S)
    high, rest = bias.to(tl.float32), (bias - base.to(tl.float64)).to(tl.float32)
    tl.store(split.bases + bh * tiles + tile, base)
    tl.store(split.rest + bh * S + j, rest, mask=j < S)
    tl.store(split.pairs + bh * 2 * S + j, high, mask=j < S)
    low = tl.where(hidden, 0.0, bias - high.to(tl.float64)).to(tl.float32)
    tl.store(split.pairs + bh * 2 * S + S + j, low, mask=j < S)
    return rest, base


@triton.jit
def load_tile(BIAS, bh, tile, H, S):
    """(the biases of a tile of keys in units of log2, fp64; which are hidden; their base, fp32)."""
    x = tl.arange(0, TILE)
    j = tile * TILE + x
    at = BIAS.pointer + bh // H * BIAS.batch + bh % H * BIAS.head + j.to(tl.int64) * BIAS.row
    given = tl.load(at, mask=j < S, other=float("-inf")).to(tl.float64)
    hidden = given == float("-inf")
    bias = tl.where(given < -MOST, -MOST, tl.where(given > MOST, MOST, given)) / LN2  # NaN stays
    bias = tl.where(hidden, float("-inf"), bias)
    # The median of the finite biases: a few large numbers, of either sign, cost the others no digit.
    before = (bias[None, :] < bias[:, None]) | ((bias[None, :] == bias[:, None]) & (x[None, :] < x[:, None]))
    place = tl.sum(before.to(tl.int32), 1)
    middle = tl.minimum((TILE + tl.sum(hidden.to(tl.int32), 0)) // 2, TILE - 1)
    base = tl.max(tl.where((place == middle) & ~hidden, bias, float("-inf")), 0)
    return bias, hidden, tl.where(base > float("-inf"), base, 0.0).to(tl.float32)
