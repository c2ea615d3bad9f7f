"""What a call must answer, in float64, and how far from it rounding and skipping may lead, number by number.

The error is a forward error analysis of attention as it is computed (docs/maths.md has the names): scores are off by what
rounding their sums costs, so a weight p is off by the factor exp(±that); what is skipped is a change of weights too. From the
weights it is carried through every sum, with the magnitudes of the terms, not of the results: where a sum cancels, its digits go.
A sum of n numbers is taken to lose 4 + √n units of the sum of their magnitudes (Higham & Mary 2019, doi:10.1137/18M1226312).
A bias b_j of a key counts from that of some finite key near the query, b_ref, and costs a few units of |b_j − b_ref|.
"""

import dataclasses
import math

import numpy as np
from differential_arrays import Arrays
from differential_calls import BITS, Call, lse_dtype, slopes_dtype

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# Relative error of an exponential, four units; see `differential_checks` for those that are worse.
EXPONENTIAL = {"float32": 2.0**-22, "float64": 2.0**-51}
TILE = 64
BIAS_UNITS = (
    4  # the difference is rounded, then its sums with the linear bias and with the product, and one is to spare
)


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """By name (output, lse, and gradients: query, key, value, slopes, right_slopes, key_bias): the result, its largest error."""

    exact: dict[str, np.ndarray]
    error: dict[str, np.ndarray]
    seen: np.ndarray  # [B, H, T, S]
    weights: np.ndarray  # [B, H, T, S]


def truth(call: Call, numbers: Arrays, *, bits: int | None = None) -> Truth:
    """Numbers that nobody may see are zeros in it. `bits`: how good an exponential is, where it is worse than usual."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _Sums(call, numbers, bits).truth()


class _Sums:
    """All [B, H, T, S] arrays of one call."""

    def __init__(self, call: Call, numbers: Arrays, bits: int | None) -> None:
        self.call, self.numbers = call, numbers
        work = "float64" if call.dtype == "float64" else "float32"
        self.unit, self.stored = 2.0 ** -(BITS[work] + 1), 2.0 ** -(BITS[call.dtype] + 1)
        self.exponential = EXPONENTIAL[work] if bits is None else 2.0**-bits
        self.smallest, self.vanished = SMALLEST[call.dtype], SMALLEST[work]  # a product may be flushed to zero
        self.seen = numbers.seen(call)
        self.blind = ~self.seen.any(-1)
        self.q = np.where(self.blind[..., None], 0.0, np.nan_to_num(numbers.query, nan=0.0, posinf=0.0, neginf=0.0))
        self.k, self.v = (np.repeat(_finite(x), call.group, 1) for x in (numbers.key, numbers.value))
        self.distance = numbers.distance()[:, None].astype(np.float64)
        heads = (call.batch, call.heads)
        left = np.broadcast_to(numbers.slopes, heads)[:, :, None, None]
        self.slope = left
        if numbers.right_slopes is not None:
            right = np.broadcast_to(numbers.right_slopes, heads)[:, :, None, None]
            self.slope = np.where(self.distance < 0, np.where(np.isinf(right), 0.0, right), left)

    def lost(self, terms: int) -> float:
        """What a sum of so many terms loses, as a share of the sum of their magnitudes."""
        return (4 + math.sqrt(terms)) * self.unit

    def truth(self) -> Truth:
        call = self.call
        d, s = call.head_dim, call.key_len
        away = np.abs(self.distance)
        products = call.factor * (self.q @ self.k.swapaxes(-1, -2))
        # Relative to the largest that a query sees, or float64 would round what is large.
        of_keys = self.numbers.bias_of_keys(call)
        shift = largest_bias(self.seen, of_keys)
        own = np.where(self.seen, of_keys[:, :, None] - shift[..., None], 0.0)
        scores = np.where(self.seen, products - self.slope * away + own, -np.inf)
        top = np.where(self.blind, 0.0, scores.max(-1, initial=-np.inf))[..., None]
        weights = np.exp(scores - top)
        total = weights.sum(-1)
        p = weights / np.where(self.blind, 1.0, total)[..., None]
        lse = np.where(self.blind, -np.inf, top[..., 0] + np.log(np.where(self.blind, 1.0, total)))
        finite_lse = np.where(self.blind, 0.0, lse)

        # Scores, their log-sum-exp, and weights.
        sizes = abs(call.factor) * (np.abs(self.q) @ np.abs(self.k).swapaxes(-1, -2) + d * self.vanished)
        far = np.maximum(
            np.where(self.seen, np.abs(scores), 0.0), np.maximum(np.abs(top), np.abs(finite_lse)[..., None])
        )
        of_score = self.lost(d) * sizes + 2 * self.unit * (np.abs(self.slope) * away + far)
        of_bias, shifted = self._rounded_biases(of_keys, shift)
        of_score += of_bias
        raised = np.where(self.seen, scores + of_score, -np.inf)
        high = np.where(self.blind, 0.0, raised.max(-1, initial=-np.inf))[..., None]
        of_lse = high[..., 0] + np.log(np.where(self.blind, 1.0, np.exp(raised - high).sum(-1))) - finite_lse
        of_lse = np.where(self.blind, 0.0, of_lse) + self.exponential + self.lost(s)
        relative = of_score + of_lse[..., None] + self.exponential + (self.stored if self.stored > self.unit else 0.0)
        tiny = 2.0**-24 if call.dtype == "float16" else 2.0**-120 if call.dtype != "float64" else 2.0**-1000
        nats = np.where(self.seen, scores - finite_lse[..., None], -np.inf)
        wide = np.exp(np.minimum(0.0, nats + relative))  # also where p itself has vanished
        of_p = np.where(relative < 1, p * np.expm1(np.minimum(relative, 1.0)), wide)
        of_p = np.where(self.seen, np.minimum(1.0, of_p) + tiny, 0.0)
        # Skipped are only weights of at most the tolerance, and the others grow by what is lost.
        share = call.share
        may_go = np.where(p <= share, p, 0.0)
        gone = np.minimum(share, may_go.sum(-1))[..., None]
        skipped = may_go + p * (gone / (1 - gone))
        self.p, self.of_p, self.skipped = p, of_p, skipped

        output = p @ self.v
        most = np.where(self.seen, np.abs(self.v).max(-1)[:, :, None], 0.0).max(-1, initial=0.0)[..., None]
        cut = np.minimum(skipped @ np.abs(self.v), 2 * share * most)
        of_output = of_p @ np.abs(self.v) + cut + self.lost(s) * (p @ np.abs(self.v))
        of_output += 2 * self.stored * np.abs(output) + self.smallest + s * self.vanished
        rounded_lse = of_lse + 4 * self.unit * (1 + np.abs(finite_lse) + shifted) + gone[..., 0] / (1 - gone[..., 0])
        rounded_lse += 2.0 ** -BITS[lse_dtype(call)] * np.abs(finite_lse + shift)
        exact, error = self._gradients(output, of_output, finite_lse)
        exact |= {"output": np.where(self.blind[..., None], 0.0, output), "lse": lse + shift}
        error |= {
            "output": np.where(self.blind[..., None], 0.0, of_output),
            "lse": np.where(self.blind, 0.0, rounded_lse),
        }
        return Truth(exact, error, self.seen, p)

    def _rounded_biases(self, of_keys: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(what biases do to scores [B, H, T, S], how far a query's largest bias may be from where they count [B, H, T])."""
        references = _references(of_keys, self.numbers, self.seen)
        shifted = np.max([np.abs(shift - x) for x in references], 0)
        used = np.where(self.seen, of_keys[:, :, None], shift[..., None])
        apart = np.max([np.abs(used - x[..., None]) for x in references], 0)
        return self.unit * (BIAS_UNITS * apart + 2 * shifted[..., None]), shifted

    def _gradients(
        self, output: np.ndarray, of_output: np.ndarray, lse: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        call, numbers, p = self.call, self.numbers, self.p
        zero = call.layout_grad == "zero" and call.through == "output"
        go = np.where(self.blind[..., None] | (call.through == "lse"), 0.0, numbers.grad_output)
        gl = np.where(self.blind | (call.through == "output"), 0.0, numbers.grad_lse)
        dp, sizes = go @ self.v.swapaxes(-1, -2), np.abs(go) @ np.abs(self.v).swapaxes(-1, -2) + self.vanished
        inner = (go * output).sum(-1) - gl
        of_inner = (np.abs(go) * (of_output + self.lost(call.head_dim) * np.abs(output))).sum(-1)
        of_inner = (of_inner + 4 * self.unit * np.abs(gl))[..., None]
        apart = dp - inner[..., None]
        ds = p * apart
        changed = self.of_p + self.skipped
        of_ds = changed * np.abs(apart) + (p + self.of_p) * (self.lost(call.head_dim) * sizes + of_inner)
        of_ds += 2 * max(self.stored, 4 * self.unit) * np.abs(ds)
        factor = abs(call.factor)
        exact, error = {}, {}

        def put(name: str, result: np.ndarray, off: np.ndarray, magnitude: np.ndarray, terms: int) -> None:
            stored = self.stored
            if "slopes" in name or name == "key_bias":
                kept = call.key_bias_as if name == "key_bias" else slopes_dtype(call)
                stored = max(self.unit, 2.0 ** -(BITS[kept] + 1))
            exact[name] = result
            error[name] = off + self.lost(terms) * magnitude + 2 * stored * np.abs(result)
            error[name] += self.smallest + terms * self.vanished

        k, q = np.abs(self.k), np.abs(self.q)
        put("query", call.factor * (ds @ self.k), factor * (of_ds @ k), factor * (np.abs(ds) @ k), call.key_len)
        terms = call.query_len * call.group
        turned, of_turned, size = ds.swapaxes(-1, -2), of_ds.swapaxes(-1, -2), np.abs(ds).swapaxes(-1, -2)
        put("key", *(self._of_group(x) for x in (call.factor * (turned @ self.q), factor * (of_turned @ q),
                                                 factor * (size @ q))), terms)  # fmt: skip
        pt, of_pt = p.swapaxes(-1, -2), (changed + self.of_p).swapaxes(-1, -2)
        put("value", *(self._of_group(x) for x in (pt @ go, of_pt @ np.abs(go), pt @ np.abs(go))), terms)
        self._slopes(ds, of_ds, p * sizes, gl, put)
        if numbers.key_bias is not None:
            sums = (self._as_given(x.sum(-2)) for x in (ds, of_ds, np.abs(ds)))
            put(
                "key_bias",
                *sums,
                call.query_len * (call.batch * call.heads * call.key_len // max(1, numbers.key_bias.size)),
            )
        if call.value_is_key:
            for of in (exact, error):
                of["key"] = of["key"] + of.pop("value")
        if zero:  # nothing comes, so nothing leaves
            error = {name: np.zeros_like(x) for name, x in error.items()}
        return exact, error

    def _slopes(self, ds: np.ndarray, of_ds: np.ndarray, terms: np.ndarray, gl: np.ndarray, put) -> None:
        """−Σ ds·|i − j| to the left and to the right, with distances from the nearest key: Σ_j ds is the lse's gradient."""
        call, away = self.call, np.abs(self.distance)
        to_right = np.broadcast_to(self.distance < 0, self.seen.shape)
        nearest = np.where(self.seen, away, np.inf).min(-1, initial=np.inf)
        one_side = ~((self.seen & to_right).any(-1) & (self.seen & ~to_right).any(-1))
        nearest = np.where(one_side & ~self.blind, nearest, 0.0)
        # Whoever counts distances from the end of the keys, give or take a tile, loses what that count costs.
        position = self.numbers.first[:, None] + np.arange(call.query_len)
        outside = np.maximum(np.maximum(-position, position - call.key_len + 1) - TILE, 0)
        counted = away - outside[:, None, :, None]
        # Plain PyTorch counts all of it: what it loses in Σ_j ds is multiplied by that, a query at a time, now up and now down.
        adrift = ((terms.sum(-1) + np.abs(gl)) * (self.p * away).sum(-1)) ** 2
        sides = {"slopes": ~to_right, "right_slopes": to_right} if call.right is not None else {"slopes": None}
        for name, side in sides.items():
            inside = self.seen if side is None else self.seen & side
            # A double counts what is left of a distance once the nearest is gone, and the gradient of lse takes the rest.
            beyond = np.where(inside, away - nearest[..., None], 0.0)
            rows = np.where(inside.any(-1), gl * nearest, 0.0)
            result = -((ds * beyond).sum(-1) + rows).sum(-1)
            off = (of_ds * inside * counted).sum((-1, -2)) + 4 * self.unit * np.abs(rows).sum(-1)
            magnitude = (np.abs(ds) * inside * counted).sum((-1, -2))
            squares = ((ds * away * inside) ** 2).sum((-1, -2)) + np.where(inside.any(-1), adrift, 0.0).sum(-1)
            given = self.numbers.slopes if name == "slopes" else self.numbers.right_slopes
            if given.ndim == 1:
                result, off, magnitude, squares = (x.sum(0) for x in (result, off, magnitude, squares))
            off = off + 4 * self.unit * np.sqrt(squares)
            infinite = np.isinf(given)
            found = (np.where(infinite, 0.0, x) for x in (result, off, magnitude))
            put(name, *found, call.query_len * call.key_len)

    def _as_given(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S] -> the shape of the bias of keys: the sum over what it was repeated for."""
        shape = self.numbers.key_bias.shape
        x = x.sum(tuple(range(x.ndim - len(shape))))
        axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
        return x.sum(axes, keepdims=True)

    def _of_group(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S, D] -> [B, K, S, D]: the sum over the query heads of a key head."""
        b, _, s, d = x.shape
        return x.reshape(b, self.call.kv_heads, self.call.group, s, d).sum(2)


def _finite(x: np.ndarray) -> np.ndarray:
    """Rows with NaN or inf are zeros."""
    return np.where(np.isfinite(x).all(-1, keepdims=True), x, 0.0)


def largest_bias(seen: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
    """[B, H, T]: the largest bias [B, H, S] of a key that a query sees, 0 where it sees none."""
    most = np.where(seen, of_keys[:, :, None], -np.inf).max(-1, initial=-np.inf)
    return np.where(most > -np.inf, most, 0.0)


def _references(of_keys: np.ndarray, numbers: Arrays, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    low = _around(np.where(in_sight.any(-1), in_sight.argmax(-1), s), TILE, s).min(-1)
    high = _around(np.where(in_sight.any(-1), s - 1 - in_sight[..., ::-1].argmax(-1), -1), TILE, -1).max(-1)
    smallest = _around(np.where(finite, of_keys, np.inf), TILE, np.inf).min(-1)
    largest = _around(np.where(finite, of_keys, -np.inf), TILE, -np.inf).max(-1)
    found: list[np.ndarray] = []
    for anchor in (position, np.clip(position, low, np.maximum(low, high))):
        index = np.broadcast_to(np.clip(anchor, 0, s - 1)[:, None], (b, h, t))
        alone = np.take_along_axis(of_keys, np.take_along_axis(nearest, index, -1), -1)
        alone = np.where(alone > -np.inf, alone, 0.0)  # no key is finite
        least, most = (np.take_along_axis(x, index, -1) for x in (smallest, largest))
        found += [alone, np.where(least < np.inf, least, alone), np.where(most > -np.inf, most, alone)]
    return np.min(found, 0), np.max(found, 0)


def _around(x: np.ndarray, width: int, fill: float) -> np.ndarray:
    """[..., n] -> [..., n, 2·width + 1]: every number and its neighbors, `fill` beyond the ends."""
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (width, width)], constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1, -1)
