"""Key biases from `key_bias` and forget gates, relative to the bias of each query's best key.

Only the difference b_j − b_best is rounded, so the truth measures biases relative to the best key: of the keys that the
query sees, the one whose bias and distance give it the largest weight. Keys that a query cannot see must not cost
accuracy, however large their biases: a bias of 1e38 or a gate of −1e38 one position away does not excuse a wrong digit.
"""

import math

import numpy as np
from differential_arrays import GATE_FLOOR, Arrays
from differential_calls import Call

NEAR_NATS = 8.0  # an implementation's origin may be any bias this close to that of the best key
EXTREME_GATE = -999.0  # sums of gates below it are kept separately, or fp64 would absorb the other gates


class RelativeBiases:
    """The relative biases of a call with `key_bias`, gates or both.

    Attributes:
        relative: [B, H, T, S] b_ij − b_i,best; 0 where query i does not see key j.
        of_best: [B, H, T] b_i,best, which is added back to the log-sum-exp; 0 if a query sees nothing.
        slack: how far from b_i,best an implementation's origin may be: NEAR_NATS, or less where all biases are closer together.
        lost: [B, H, T, S], the rounding error that fp64 may make before it forms b_ij − b_i,best: in the difference of
            two sums of gates, closed gates included, and in the sums of `key_bias` and gates of both keys, if a call has
            both.
    """

    def __init__(self, call: Call, numbers: Arrays, seen: np.ndarray) -> None:
        b, h, t, s = seen.shape
        own = np.broadcast_to(numbers.bias_of_keys(call), (b, h, s))
        own = np.where(own > -np.inf, own, 0.0)
        sums, extreme, run = _gates(numbers.gates_of(call))
        position = np.clip(
            numbers.first[:, None] + np.arange(t), 0, max(0, s - 1)
        )  # only used with gates, where it lies inside the keys

        def of_query(x: np.ndarray) -> np.ndarray:  # [B, H, S] -> [B, H, T]
            return np.take_along_axis(x, np.broadcast_to(position[:, None], (b, h, t)), -1)

        def jumps(i: np.ndarray, j: np.ndarray) -> np.ndarray:  # exact sums of the extreme gates from run j to run i
            batch, head = np.ogrid[:b, :h]
            rest = (1,) * (max(i.ndim, j.ndim) - 2)
            return extreme[batch.reshape(b, 1, *rest), head.reshape(1, h, *rest), i, j]

        if b * h * t * s == 0:
            self.relative, self.of_best, self.slack = np.zeros(seen.shape), np.zeros((b, h, t)), 0.0
            self.lost = self.relative
            return
        query_sums, query_run = of_query(sums), of_query(run)
        cuts = np.isneginf(numbers.gates_of(call)).sum(-1).max()
        lost = 2.0**-51 * float(np.abs(sums).max() + np.abs(extreme).max() - GATE_FLOOR * cuts)
        fine = own[:, :, None] + (query_sums[..., None] - sums[:, :, None])
        coarse = jumps(query_run[..., None], run[:, :, None])
        distance = numbers.distance()[:, None].astype(np.float64)
        slopes = np.broadcast_to(numbers.slopes, (b, h))[:, :, None, None]
        right = (
            slopes if numbers.right_slopes is None else np.broadcast_to(numbers.right_slopes, (b, h))[:, :, None, None]
        )
        linear = np.where(distance < 0, np.where(np.isinf(right), 0.0, right), slopes) * np.abs(distance)
        nats = np.where(seen, fine + coarse - linear, -np.inf)
        most = nats.max(-1, keepdims=True)
        # If an extreme gate absorbs the rest of the sum, the rest breaks the tie.
        tied = seen & (nats >= most - 1e-12 * np.abs(np.where(most > -np.inf, most, 0.0)))
        best = np.where(tied, fine - linear, -np.inf).argmax(-1)

        def at_best(x: np.ndarray) -> np.ndarray:  # [B, H, S] -> [B, H, T]
            return np.take_along_axis(x, best, -1)

        best_own, best_sums, best_run = at_best(own), at_best(sums), at_best(run)
        relative = (own[:, :, None] - best_own[..., None]) + (best_sums[..., None] - sums[:, :, None])
        relative += jumps(best_run[..., None], run[:, :, None])
        self.relative = np.where(seen, relative, 0.0)
        of_best = best_own + (query_sums - best_sums) + jumps(query_run, best_run)
        self.of_best = np.where(seen.any(-1), of_best, 0.0)
        spread = self.relative.max() - self.relative.min() + self.of_best.max() - self.of_best.min()
        self.slack = min(NEAR_NATS, float(spread))
        self.lost = np.full(seen.shape, lost)
        if call.key_bias is not None and call.gates is not None:
            formed = np.abs(own - sums) + np.abs(extreme[:, :, 0]).max(-1)[..., None]
            self.lost += np.where(seen, 2.0**-53 * (formed[:, :, None] + at_best(formed)[..., None]), 0.0)


def _gates(gates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([B, H, S] sums without extreme gates; [B, H, R, R] sums of extreme gates between runs; [B, H, S] run index)."""
    b, h = gates.shape[:2]
    gates = np.where(gates > -np.inf, gates, 0.0)  # nothing is seen across a cut
    is_extreme = gates < EXTREME_GATE
    run = is_extreme.cumsum(-1)
    runs = int(run.max(initial=0)) + 1
    extreme = np.zeros((b, h, runs, runs))
    for at in np.ndindex(b, h):
        found = gates[at][is_extreme[at]]
        for i in range(len(found) + 1):
            for j in range(i):
                extreme[(*at, i, j)] = math.fsum(found[j:i])
                extreme[(*at, j, i)] = -extreme[(*at, i, j)]
    return np.where(is_extreme, 0.0, gates).cumsum(-1), extreme, run


def relative_biases(call: Call, numbers: Arrays, seen: np.ndarray) -> RelativeBiases | None:
    """Returns None if the call has neither key biases nor gates."""
    return RelativeBiases(call, numbers, seen) if call.key_bias is not None or call.gates is not None else None
