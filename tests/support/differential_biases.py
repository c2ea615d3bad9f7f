"""From which biases of keys those of a query may count; see `differential_truth.py`."""

from collections.abc import Callable

import numpy as np
from differential_arrays import Arrays

TILE = 64


def largest_bias(seen: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
    """[B, H, T]: the largest bias [B, H, S] of a key that a query sees, 0 where it sees none."""
    most = np.where(seen, of_keys[:, :, None], -np.inf).max(-1, initial=-np.inf)
    return np.where(most > -np.inf, most, 0.0)


def references(of_keys: np.ndarray, numbers: Arrays, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([B, H, T], [B, H, T]): the smallest and the largest of the biases from which those of a query may count.

    They are those of the finite keys within TILE positions of the query, and of the nearest finite one to its left, else to its
    right; and the same around the nearest position that any query of its block may see.
    """
    b, h, s = of_keys.shape
    t = seen.shape[2]
    if s == 0 or t == 0 or not of_keys.any():
        return np.zeros((b, h, t)), np.zeros((b, h, t))
    at, finite = np.arange(s), of_keys > -np.inf
    before = np.maximum.accumulate(np.where(finite, at, -1), -1)
    after = np.minimum.accumulate(np.where(finite, at, s)[..., ::-1], -1)[..., ::-1]
    nearest = np.where(before >= 0, before, after % s)

    position = numbers.first[:, None] + np.arange(t)
    in_sight = seen.any(1)
    low = _around(np.where(in_sight.any(-1), in_sight.argmax(-1), s), s, np.minimum)
    high = _around(np.where(in_sight.any(-1), s - 1 - in_sight[..., ::-1].argmax(-1), -1), -1, np.maximum)
    smallest = _around(np.where(finite, of_keys, np.inf), np.inf, np.minimum)
    largest = _around(np.where(finite, of_keys, -np.inf), -np.inf, np.maximum)
    found: list[np.ndarray] = []
    for anchor in (position, np.clip(position, low, np.maximum(low, high))):
        index = np.broadcast_to(np.clip(anchor, 0, s - 1)[:, None], (b, h, t))
        alone = np.take_along_axis(of_keys, np.take_along_axis(nearest, index, -1), -1)
        alone = np.where(alone > -np.inf, alone, 0.0)  # no key is finite
        least, most = (np.take_along_axis(x, index, -1) for x in (smallest, largest))
        found += [alone, np.where(least < np.inf, least, alone), np.where(most > -np.inf, most, alone)]
    return np.min(found, 0), np.max(found, 0)


def _around(x: np.ndarray, fill: float, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """[..., n]: the least or the largest of every number and its TILE neighbors on either side, `fill` beyond the ends."""
    x = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (TILE, TILE)], constant_values=fill)
    width = 1  # of the window whose pick stands at its first number
    while 2 * width <= 2 * TILE + 1:
        x, width = pick(x[..., :-width], x[..., width:]), 2 * width
    rest = 2 * TILE + 1 - width
    return pick(x[..., :-rest], x[..., rest:]) if rest else x
