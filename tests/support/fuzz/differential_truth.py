"""The correct results of a call in float64, with an error bound for rounding and skipping on every number.

The error is a forward error analysis of attention as it is computed (docs/maths.md has the names): scores have the
rounding error e of their sums, so a weight p is off by the factor exp(±e); skipping also changes weights. Errors
propagate from the weights through every sum, scaled by the magnitudes of the terms, not of the results: a sum that
cancels loses digits. A sum of n numbers is assumed to lose 4 + √n units of the sum of their magnitudes (Higham & Mary
2019, doi:10.1137/18M1226312). A key's bias, from `key_bias` and gates, is relative to that of the query's best key and
costs a few units of the difference (`differential_biases.py`). Dropout multiplies weights, but not in the log-sum-exp,
by factors that cost two units each: their rounding and the product's. A gate's gradient is the sum of the scores'
gradients over the pairs that the gate separates.

Extreme inputs do not relax the bounds. If fp64 has a result within the dtype's range, the result must be finite and
within its error bound, even if slopes are 3e38, values 1e20 or other keys' biases 1e38. The only exceptions are calls
in which products of queries, keys and values overflow fp32 (`Call.is_huge`); those are compared with plain PyTorch.

Arrays over queries and keys hold one block of queries at a time, with the keys that any of them sees, and most
operations are in place. The arrays then fit into the processor's caches, and computing the truth costs less than the
results to compare.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from differential_arrays import GATE_FLOOR, Arrays
from differential_biases import relative_biases
from differential_block import Block
from differential_calls import BITS, Call, slopes_dtype, wanted
from dropout_oracle import drawn_seed, factors

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# Relative error of an exponential, four units; see `differential_checks` for less accurate ones.
EXPONENTIAL = {"float32": 2.0**-22, "float64": 2.0**-51}
BLOCK, LEAST_ROWS = 2**16, 32  # scores per block, and the fewest queries of a block with long rows


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """Results and their largest allowed errors, by name: output, lse, and requested gradients (from `INPUTS`)."""

    exact: dict[str, np.ndarray]
    error: dict[str, np.ndarray]
    seen: np.ndarray  # [B, H, T, S]
    weights: np.ndarray | None  # [B, H, T, S], if the call checks its reach


def truth(call: Call, numbers: Arrays, *, bits: int | None = None) -> Truth:
    """The truth of a call; hidden numbers count as zeros. `bits` is the accuracy of a less accurate exponential."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _Sums(call, numbers, bits).truth()


def dropout_factors(call: Call, numbers: Arrays) -> np.ndarray | None:
    """[B, H, T, S] factors of the weights; None without dropout."""
    if call.dropout_p == 0:
        return None
    return factors(
        drawn_seed(call.torch_seed),
        call.dropout_p,
        batch=call.batch,
        heads=call.heads,
        positions=numbers.first[:, None] + np.arange(call.query_len),
        key_len=call.key_len,
    ).numpy()


class _Sums:
    """The sums of one call over its blocks of queries. Names that begin with `of_` hold errors."""

    def __init__(self, call: Call, numbers: Arrays, bits: int | None) -> None:
        self.call, self.numbers, self.wanted = call, numbers, wanted(call)
        if call.value_is_key and "key" in self.wanted:
            self.wanted += ("value",)
        work = "float64" if call.dtype == "float64" else "float32"
        self.unit, self.stored = 2.0 ** -(BITS[work] + 1), 2.0 ** -(BITS[call.dtype] + 1)
        self.exponential = EXPONENTIAL[work] if bits is None else 2.0**-bits
        self.smallest, self.vanished = SMALLEST[call.dtype], SMALLEST[work]  # a product may be flushed to zero
        self.tiny = 2.0**-24 if call.dtype == "float16" else 2.0**-120 if call.dtype != "float64" else 2.0**-1000
        self.seen = numbers.seen(call)
        self.blind = ~self.seen.any(-1)
        self.factors = dropout_factors(call, numbers)
        self.of_factor = 0.0 if self.factors is None else 2 * self.unit
        self._inputs()
        self._results()

    def _inputs(self) -> None:
        call, numbers, blind = self.call, self.numbers, self.blind
        self.q = np.where(blind[..., None], 0.0, np.nan_to_num(numbers.query, nan=0.0, posinf=0.0, neginf=0.0))
        unseen = ~self.seen.any(2)[..., None]
        self.k, self.v = (
            np.where(unseen, 0.0, np.repeat(finite_rows(x), call.group, 1)) for x in (numbers.key, numbers.value)
        )
        self.go = np.where(blind[..., None] | (call.through == "lse"), 0.0, numbers.grad_output)
        self.gl = np.where(blind | (call.through == "output"), 0.0, numbers.grad_lse)
        self.of_q, self.of_k, self.of_v, self.of_go = (np.abs(x) for x in (self.q, self.k, self.v, self.go))
        heads = (call.batch, call.heads)
        self.left, self.right = np.broadcast_to(numbers.slopes, heads)[:, :, None, None], None
        if numbers.right_slopes is not None:
            right = np.broadcast_to(numbers.right_slopes, heads)[:, :, None, None]
            self.right = np.where(np.isinf(right), 0.0, right)
        self.biases = relative_biases(call, numbers, self.seen)
        self.shift = np.zeros(blind.shape) if self.biases is None else self.biases.of_best
        self.sinks = None if numbers.sink_logits is None else numbers.sink_logits[None, :, None]
        self.slack = 0.0 if self.biases is None else self.biases.slack

    def _results(self) -> None:
        call = self.call
        queries, keys = (call.batch, call.heads, call.query_len), (call.batch, call.heads, call.key_len)
        d = call.head_dim
        self.weights = np.zeros(self.seen.shape) if call.asks_reach else None
        self.output, self.of_output, self.dq, self.of_dq = (np.zeros((*queries, d)) for _ in range(4))
        self.dk, self.of_dk, self.dv, self.of_dv = (np.zeros((*keys, d)) for _ in range(4))
        self.lse, self.of_lse = np.full(queries, -np.inf), np.zeros(queries)
        self.dbias, self.of_dbias = np.zeros(keys), np.zeros(keys)
        self.dgate, self.of_dgate, self.gate_squares = np.zeros(keys), np.zeros(keys), np.zeros(keys[:2])
        self.dsink, self.of_dsink = np.zeros(call.heads), np.zeros(call.heads)
        sides = ("slopes", "right_slopes") if call.right is not None else ("slopes",)
        self.dslopes = {side: np.zeros((3, call.batch, call.heads)) for side in sides if side in self.wanted}

    def lost(self, terms: int) -> float:
        """The rounding error of a sum with this many terms, as a share of the sum of their magnitudes."""
        return (4 + math.sqrt(terms)) * self.unit

    def blocks(self) -> Iterator[Block]:
        """Yields blocks: queries of some sequences and heads, with the range of keys that any of them sees."""
        b, h, t, s = self.seen.shape
        rows = max(LEAST_ROWS, BLOCK // max(1, s))
        heads = max(1, rows // max(1, t))
        batch = max(1, heads // h)
        for first in range(0, b, batch):
            for head in range(0, h, heads):
                for query in range(0, t, rows):
                    at = np.s_[first : first + batch, head : head + heads, query : query + rows]
                    keys = np.flatnonzero(self.seen[at].any((0, 1, 2)))
                    if keys.size:
                        whole = self.call.gates is not None
                        yield Block(self, at, slice(0, s) if whole else slice(int(keys[0]), int(keys[-1]) + 1))

    def truth(self) -> Truth:
        call = self.call
        for block in self.blocks():
            block.weigh()
            block.put_output()
            if self.wanted:
                block.put_gradients()
        self.of_output += 2 * self.stored * np.abs(self.output) + self.smallest + call.key_len * self.vanished
        exact = {"output": self.output, "lse": self.lse + self.shift}
        error = {"output": np.where(self.blind[..., None], 0.0, self.of_output), "lse": self.of_lse}
        for name, (result, off, terms, stored) in self._gradients().items():
            exact[name] = result
            error[name] = off + 2 * stored * np.abs(result) + self.smallest + terms * self.vanished
        if call.value_is_key and "key" in exact:
            for of in (exact, error):
                of["key"] = of["key"] + of.pop("value")
        if call.layout_grad == "zero" and call.through == "output":  # a zero gradient has no error
            error |= {name: np.zeros_like(x) for name, x in error.items() if name not in ("output", "lse")}
        return Truth(exact, error, self.seen, self.weights)

    def _gradients(self) -> dict[str, tuple[np.ndarray, np.ndarray, int, float]]:
        """By name: (gradient, its error before storing, number of terms in its sums, unit of its dtype)."""
        call, numbers, found = self.call, self.numbers, {}
        terms = call.query_len * call.group
        if "query" in self.wanted:
            found["query"] = self.dq, self.of_dq, call.key_len, self.stored
        if "key" in self.wanted:
            found["key"] = self._of_group(self.dk), self._of_group(self.of_dk), terms, self.stored
        if "value" in self.wanted:
            found["value"] = self._of_group(self.dv), self._of_group(self.of_dv), terms, self.stored
        for name, (result, off, squares) in self.dslopes.items():
            given = numbers.slopes if name == "slopes" else numbers.right_slopes
            if given.ndim == 1:
                result, off, squares = (x.sum(0) for x in (result, off, squares))
            result, off = (np.where(np.isinf(given), 0.0, x) for x in (result, off + 4 * self.unit * np.sqrt(squares)))
            stored = max(self.unit, 2.0 ** -(BITS[slopes_dtype(call)] + 1))
            found[name] = result, off, call.query_len * call.key_len, stored
        if "key_bias" in self.wanted:
            terms = call.query_len * (call.batch * call.heads * call.key_len // max(1, numbers.key_bias.size))
            stored = max(self.unit, 2.0 ** -(BITS[call.key_bias_as] + 1))
            found["key_bias"] = self._as_given(self.dbias), self._as_given(self.of_dbias), terms, stored
        if "log_fgate" in self.wanted:
            stored = max(self.unit, 2.0 ** -(BITS[call.gates_as] + 1))
            off = self._of_gates(self.of_dgate + 4 * np.sqrt(self.gate_squares)[..., None])
            found["log_fgate"] = self._of_gates(self.dgate), off, call.query_len * call.key_len, stored
        if "sink_logits" in self.wanted:
            found["sink_logits"] = self.dsink, self.of_dsink, call.batch * call.query_len, max(self.unit, 2.0**-24)
        return found

    def _as_given(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S] -> the shape of the key bias: sums over the broadcast axes."""
        shape = self.numbers.key_bias.shape
        x = x.sum(tuple(range(x.ndim - len(shape))))
        axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
        return x.sum(axes, keepdims=True)

    def _of_gates(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S] -> the shape of the gates."""
        x = x if self.call.gates_shape == "BHS" else self._of_group(x[..., None])[..., 0]
        return np.where(self.numbers.log_fgate < GATE_FLOOR, 0.0, x)

    def _of_group(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S, D] -> [B, K, S, D]: sums over the query heads of each key head."""
        b, _, s, d = x.shape
        return x.reshape(b, self.call.kv_heads, self.call.group, s, d).sum(2)


def finite_rows(x: np.ndarray) -> np.ndarray:
    """Replaces rows with NaN or inf by zeros."""
    return np.where(np.isfinite(x).all(-1, keepdims=True), x, 0.0)
