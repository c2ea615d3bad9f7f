"""What a call must answer, in float64, and how far from it rounding and skipping may lead, number by number.

The error is a forward error analysis of attention as it is computed (docs/maths.md has the names): scores are off by what
rounding their sums costs, so a weight p is off by the factor exp(±that); what is skipped is a change of weights too. From the
weights it is carried through every sum, with the magnitudes of the terms, not of the results: where a sum cancels, its digits go.
A sum of n numbers is taken to lose 4 + √n units of the sum of their magnitudes (Higham & Mary 2019, doi:10.1137/18M1226312).
A bias of a key, from `key_bias` and gates, counts from that of the query's best key and costs a few units of the difference
(`differential_biases.py`). Dropout multiplies weights, but not in the log-sum-exp, by factors that cost two units each, their own
rounding and a product's. The gradient of a gate is the sum of the scores' gradients over the pairs that the gate lies between.

Extreme inputs excuse nothing. A result that fp64 has as a number within the dtype's range must be a number, and exact to what its
terms lose, even if slopes are 3e38, values 1e20 or other keys' biases 1e38. The only exception are calls whose queries, keys and
values leave fp32 in their own products (`Call.is_huge`): there plain PyTorch sets the standard.

Arrays of queries and keys are made for a block of queries at a time, with the keys that any of them sees, and most of what is
done to them is done in place: a processor's caches hold them, and the truth costs less than the answers that are held against it.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from differential_arrays import GATE_FLOOR, Arrays
from differential_biases import relative_biases
from differential_calls import BITS, Call, lse_dtype, slopes_dtype, wanted
from dropout_oracle import drawn_seed, factors

SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# Relative error of an exponential, four units; see `differential_checks` for those that are worse.
EXPONENTIAL = {"float32": 2.0**-22, "float64": 2.0**-51}
TILE = 64
BLOCK, LEAST_ROWS = 2**16, 32  # scores of a block, queries of one that has long rows
# The difference is rounded, then its sums with the linear bias and with the product, and one is to spare.
BIAS_UNITS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """By name (output, lse, and the gradients that the call wants, named in `INPUTS`): the
    result, its largest error.
    """

    exact: dict[str, np.ndarray]
    error: dict[str, np.ndarray]
    seen: np.ndarray  # [B, H, T, S]
    weights: np.ndarray | None  # [B, H, T, S], of a call that asks for its reach


def truth(call: Call, numbers: Arrays, *, bits: int | None = None) -> Truth:
    """Numbers that nobody may see are zeros in it. `bits`: how good an exponential is, where it is worse than usual."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _Sums(call, numbers, bits).truth()


def dropout_factors(call: Call, numbers: Arrays) -> np.ndarray | None:
    """[B, H, T, S], of the weights; None without dropout."""
    if call.dropout_p == 0:
        return None
    return factors(
        drawn_seed(call.torch_seed), call.dropout_p, batch=call.batch, heads=call.heads,
        positions=numbers.first[:, None] + np.arange(call.query_len), key_len=call.key_len,
    ).numpy()  # fmt: skip


class _Sums:
    """The sums of one call over its blocks of queries. Names that begin with `of_` are of errors."""

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
            np.where(unseen, 0.0, np.repeat(_finite(x), call.group, 1)) for x in (numbers.key, numbers.value)
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
        """What a sum of so many terms loses, as a share of the sum of their magnitudes."""
        return (4 + math.sqrt(terms)) * self.unit

    def blocks(self) -> Iterator["_Block"]:
        """Queries of some sequences and heads, with the keys from the first to the last that any of them sees."""
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
                        yield _Block(self, at, slice(0, s) if whole else slice(int(keys[0]), int(keys[-1]) + 1))

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
        if call.layout_grad == "zero" and call.through == "output":  # nothing comes, so nothing leaves
            error |= {name: np.zeros_like(x) for name, x in error.items() if name not in ("output", "lse")}
        return Truth(exact, error, self.seen, self.weights)

    def _gradients(self) -> dict[str, tuple[np.ndarray, np.ndarray, int, float]]:
        """By name: (gradient, its error but for what storing it costs, terms of its sums, unit of the dtype that it has)."""
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
        """[B, H, S] -> the shape of the bias of keys: the sum over what it was repeated for."""
        shape = self.numbers.key_bias.shape
        x = x.sum(tuple(range(x.ndim - len(shape))))
        axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
        return x.sum(axes, keepdims=True)

    def _of_gates(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S] -> the shape of the gates."""
        x = x if self.call.gates_shape == "BHS" else self._of_group(x[..., None])[..., 0]
        return np.where(self.numbers.log_fgate < GATE_FLOOR, 0.0, x)

    def _of_group(self, x: np.ndarray) -> np.ndarray:
        """[B, H, S, D] -> [B, K, S, D]: the sum over the query heads of a key head."""
        b, _, s, d = x.shape
        return x.reshape(b, self.call.kv_heads, self.call.group, s, d).sum(2)


class _Block:
    """Queries [b, h, t] and the keys that they see; scores, weights and all that comes of them are [b, h, t, s]."""

    def __init__(self, sums: _Sums, at: tuple[slice, slice, slice], keys: slice) -> None:
        b, h, t = at
        self.sums, self.at, self.keys = sums, at, (b, h, keys)
        self.seen, self.blind = sums.seen[b, h, t, keys], sums.blind[at]
        self.hidden = ~self.seen
        self.position = (sums.numbers.first[b, None] + np.arange(sums.call.query_len)[t])[:, None]
        distance = (self.position[..., None] - np.arange(sums.call.key_len)[keys]).astype(np.float64)  # [b, 1, t, s]
        self.away, self.to_right = np.abs(distance), distance < 0
        self.factors = None if sums.factors is None else sums.factors[b, h, t, keys]
        self.go, self.gl, self.of_go, self.of_gl = sums.go[at], sums.gl[at], sums.of_go[at], np.zeros(self.blind.shape)
        self.more_of_go = np.zeros(self.go.shape)  # error of the gradient that comes to the output, with a sink
        self.share = self.of_share = None

    def dropped(self, x: np.ndarray) -> np.ndarray:
        """Of weights, or of what is multiplied by them: times the factors of dropout."""
        return x if self.factors is None else x * self.factors

    def weigh(self) -> None:
        """p, and how far it may be off: by the errors of scores and of their log-sum-exp, and by what is skipped."""
        sums, call = self.sums, self.sums.call
        scores, far, of_score = self._scores()
        top = np.where(self.blind, 0.0, scores.max(-1))[..., None]
        self.p = np.exp(scores - top)
        total = np.where(self.blind, 1.0, self.p.sum(-1))
        self.p /= total[..., None]
        lse = np.where(self.blind, 0.0, top[..., 0] + np.log(total))
        np.maximum(far, np.maximum(np.abs(top), np.abs(lse)[..., None]), out=far)
        far *= 2 * sums.unit
        of_score += far
        if call.bad == "seen":  # what others do not see may be the largest of numbers
            np.copyto(of_score, 0.0, where=self.hidden)
        raised = np.add(scores, of_score, out=far)
        high = np.where(self.blind, 0.0, raised.max(-1))[..., None]
        raised -= high
        total = np.where(self.blind, 1.0, np.exp(raised, out=raised).sum(-1))
        of_lse = np.where(self.blind, 0.0, high[..., 0] + np.log(total) - lse)
        of_lse += sums.exponential + sums.lost(call.key_len)

        of_score += (of_lse + sums.exponential + (sums.stored if sums.stored > sums.unit else 0.0))[..., None]
        beyond = ~(of_score < 1)
        self.of_p = np.minimum(of_score, 1.0, out=raised)
        np.expm1(self.of_p, out=self.of_p)
        self.of_p *= self.p
        if beyond.any():  # also where p itself has vanished
            scores -= lse[..., None]
            self.of_p[beyond] = np.exp(np.minimum(0.0, scores[beyond] + of_score[beyond]))
        np.minimum(self.of_p, 1.0, out=self.of_p)
        self.of_p += sums.tiny * self.seen
        self._skip()
        shift = sums.shift[self.at]
        of_lse += 4 * sums.unit * (1 + np.abs(lse) + sums.slack) + self.grown
        of_lse += 2.0 ** -BITS[lse_dtype(call)] * np.abs(lse + shift)
        sums.lse[self.at] = np.where(self.blind, -np.inf, lse)
        sums.of_lse[self.at] = np.where(self.blind, 0.0, of_lse)
        if sums.sinks is not None:
            self._share_with_sink(lse + shift, of_lse)
        if sums.weights is not None:
            sums.weights[(*self.at, self.keys[2])] = self.p

    def _share_with_sink(self, lse: np.ndarray, of_lse: np.ndarray) -> None:
        """σ(lse − sink), the share of the weights that keys have, and how far it is off."""

        def sigmoid(x: np.ndarray) -> np.ndarray:
            small = np.exp(-np.abs(x))
            return np.where(x < 0, small, 1.0) / (1.0 + small)

        x, unit = lse - self.sums.sinks[:, self.at[1]], self.sums.unit
        off = of_lse + 2 * unit * np.abs(np.nan_to_num(x, posinf=0.0))
        self.share = sigmoid(x)
        self.of_share = np.maximum(sigmoid(x + off) - self.share, self.share - sigmoid(x - off))
        self.of_share += 4 * unit * self.share + self.sums.vanished

    def _put_sink(self) -> None:
        """The gradient of the sink; what comes to output and lse becomes what comes to those of the keys alone."""
        sums, call, (_, h, _) = self.sums, self.sums.call, self.at
        left = self.share * (1 - self.share)
        of_left = self.of_share + 4 * sums.unit * self.share
        inner, of_output = (self.go * self.output).sum(-1), self.of_output + self._stored()
        of_inner = (self.of_go * (of_output + sums.lost(call.head_dim) * np.abs(self.output))).sum(-1)
        off = of_inner * (left + of_left) + np.abs(inner) * of_left
        sums.dsink[h] -= (inner * left).sum((0, 2))
        sums.of_dsink[h] += (off + sums.lost(call.batch * call.query_len) * np.abs(inner) * left).sum((0, 2))
        self.gl, self.of_gl = self.gl + inner * left, off
        self.more_of_go = (
            self.of_go * (self.of_share + 2 * (sums.stored + sums.unit) * self.share)[..., None] + sums.smallest
        )
        self.go, self.of_go = (x * self.share[..., None] for x in (self.go, self.of_go))

    def _scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(scores, −inf where a query may not look; their sizes; how far they are off, but for what their size and lse cost)."""
        sums, call = self.sums, self.sums.call
        b, h, _ = self.at
        linear = sums.left[b, h] if sums.right is None else np.where(self.to_right, sums.right[b, h], sums.left[b, h])
        linear = linear * self.away
        scores = sums.q[self.at] @ sums.k[self.keys].swapaxes(-1, -2)
        scores *= call.factor
        scores -= linear
        of_score = sums.of_q[self.at] @ sums.of_k[self.keys].swapaxes(-1, -2)
        of_score += call.head_dim * sums.vanished
        of_score *= sums.lost(call.head_dim) * abs(call.factor)
        np.abs(linear, out=linear)
        linear *= 2 * sums.unit
        of_score += linear
        if sums.biases is not None:
            relative = sums.biases.relative[(*self.at, self.keys[2])]
            scores += relative
            of_score += sums.unit * (BIAS_UNITS * (np.abs(relative) + sums.slack) + 2 * sums.slack)
            of_score += sums.biases.lost[(*self.at, self.keys[2])]
        sizes = np.abs(scores, out=linear)
        np.copyto(scores, -np.inf, where=self.hidden)
        return scores, sizes, of_score

    def _skip(self) -> None:
        """Skipped are only weights of at most the tolerance, and the others grow by what is lost."""
        share = self.sums.call.share
        self.skipped = self.p * (self.p <= share)
        gone = np.minimum(share, self.skipped.sum(-1))
        self.grown = gone / (1 - gone)
        self.skipped += self.p * self.grown[..., None]

    def put_output(self) -> None:
        sums = self.sums
        v, of_v, share = sums.v[self.keys], sums.of_v[self.keys], sums.call.share
        self.output = self.dropped(self.p) @ v
        most = (self.seen * of_v.max(-1)[:, :, None]).max(-1)[..., None]
        self.of_output = np.minimum(self.dropped(self.skipped) @ of_v, 2 * share / (1 - sums.call.dropout_p) * most)
        lost = sums.lost(sums.call.key_len) + sums.of_factor
        self.of_output += self.dropped(self.of_p + lost * self.p) @ of_v
        sums.output[self.at], sums.of_output[self.at] = self.output, self.of_output
        if self.share is not None:
            share, of_share = self.share[..., None], self.of_share[..., None]
            off = (self.of_output + self._stored()) * (share + of_share) + np.abs(self.output) * of_share
            sums.output[self.at], sums.of_output[self.at] = self.output * share, off

    def put_gradients(self) -> None:
        sums, call = self.sums, self.sums.call
        if self.share is not None:
            self._put_sink()
        ds, of_ds, adrift = self._of_scores()
        size, factor = np.abs(ds), abs(call.factor)

        def with_lost(off: np.ndarray, magnitude: np.ndarray, terms: int) -> np.ndarray:
            found = magnitude * sums.lost(terms)
            found += off
            return found

        if "query" in sums.wanted:
            sums.dq[self.at] = call.factor * (ds @ sums.k[self.keys])
            sums.of_dq[self.at] = factor * (with_lost(of_ds, size, call.key_len) @ sums.of_k[self.keys])
        terms = call.query_len * call.group
        if "key" in sums.wanted:
            sums.dk[self.keys] += call.factor * (ds.swapaxes(-1, -2) @ sums.q[self.at])
            sums.of_dk[self.keys] += factor * (with_lost(of_ds, size, terms).swapaxes(-1, -2) @ sums.of_q[self.at])
        if "value" in sums.wanted:
            sums.dv[self.keys] += self.dropped(self.p).swapaxes(-1, -2) @ self.go
            changed = with_lost(self.skipped, self.p, terms)
            changed += 2 * self.of_p + sums.of_factor * self.p
            sums.of_dv[self.keys] += self.dropped(changed).swapaxes(-1, -2) @ self.of_go
            sums.of_dv[self.keys] += self.dropped(self.p + changed).swapaxes(-1, -2) @ self.more_of_go
        if sums.dslopes:
            self._put_slopes(ds, with_lost(of_ds, size, call.query_len * call.key_len), adrift)
        if "key_bias" in sums.wanted:
            terms = call.query_len * (call.batch * call.heads * call.key_len // max(1, sums.numbers.key_bias.size))
            sums.dbias[self.keys] += ds.sum(-2)
            sums.of_dbias[self.keys] += with_lost(of_ds, size, terms).sum(-2)

        if "log_fgate" in sums.wanted:
            self._put_gates(ds, with_lost(of_ds, size, call.key_len))

    def _put_gates(self, ds: np.ndarray, of_ds: np.ndarray) -> None:
        """Σ ds_ij over j < l ≤ i. What rows and columns of ds lose does not cancel where only their difference is summed."""
        b, h, _ = self.at
        before = np.arange(ds.shape[-1]) <= self.position[..., None]  # gate l may lie between query i and keys before l
        for found, x in ((self.sums.dgate, ds), (self.sums.of_dgate, of_ds)):
            found[b, h, 1:] += np.where(before[..., 1:], x.cumsum(-1)[..., :-1], 0.0).sum(-2)
        self.sums.gate_squares[b, h] += np.square(of_ds).sum((-1, -2))

    def _of_scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(gradients of scores; how far they are off; [b, h, t] what plain PyTorch may lose in their sum, in units)."""
        sums, call = self.sums, self.sums.call
        go, gl, lost = self.go, self.gl, sums.lost(call.head_dim)
        of_go = self.of_go
        lost += sums.of_factor
        ds = self.dropped(go @ sums.v[self.keys].swapaxes(-1, -2))
        sizes = of_go @ sums.of_v[self.keys].swapaxes(-1, -2)
        sizes += sums.vanished
        sizes = self.dropped(sizes)
        ds -= ((go * self.output).sum(-1) - gl)[..., None]
        of_inner = (of_go * (self.of_output + self._stored() + lost * np.abs(self.output))).sum(-1)
        of_inner += 4 * sums.unit * np.abs(gl) + self.of_gl + (self.more_of_go * np.abs(self.output)).sum(-1)
        if call.bad == "seen":
            for x in (ds, sizes):
                np.copyto(x, 0.0, where=self.hidden)
        of_ds = self.of_p + self.skipped
        of_ds += 2 * max(sums.stored, 4 * sums.unit) * self.p
        of_ds *= np.abs(ds)
        ds *= self.p
        terms = np.einsum("bhts,bhts->bht", self.p, sizes) + np.abs(gl)
        sizes *= lost
        sizes += of_inner[..., None]
        if self.share is not None:
            sizes += self.dropped(self.more_of_go @ sums.of_v[self.keys].swapaxes(-1, -2))
        sizes *= self.p + self.of_p
        of_ds += sizes
        return ds, of_ds, (terms * np.einsum("bhts,bxts->bht", self.p, self.away)) ** 2

    def _stored(self) -> np.ndarray:
        sums = self.sums
        return 2 * sums.stored * np.abs(self.output) + sums.smallest + sums.call.key_len * sums.vanished

    def _put_slopes(self, ds: np.ndarray, of_ds: np.ndarray, adrift: np.ndarray) -> None:
        """−Σ ds·|i − j| to the left and to the right, with distances from the nearest key: Σ_j ds is the lse's gradient."""
        sums, call, away = self.sums, self.sums.call, self.away
        gl = self.gl
        nearest = np.where(self.seen, away, np.inf).min(-1)
        of_right = (self.seen & self.to_right).any(-1)
        of_left = (self.seen & ~self.to_right).any(-1)
        nearest = np.where(~(of_right & of_left) & ~self.blind, nearest, 0.0)
        # Whoever counts distances from the end of the keys, give or take a tile, loses what that count costs.
        outside = np.maximum(np.maximum(-self.position, self.position - call.key_len + 1) - TILE, 0)
        counted = away - outside[..., None]
        # A double counts what is left of a distance once the nearest is gone, and the gradient of lse takes the rest.
        beyond = away - nearest[..., None]
        for name, found in sums.dslopes.items():
            of_side, inside = (ds, of_ds, counted), of_left | of_right
            if call.right is not None:
                side, inside = (~self.to_right, of_left) if name == "slopes" else (self.to_right, of_right)
                of_side = tuple(x * side for x in of_side)
            rows = np.where(inside, gl * nearest, 0.0)
            result = -np.einsum("bhts,bhts->bh", of_side[0], beyond) - rows.sum(-1)
            off = np.einsum("bhts,bxts->bh", of_side[1], of_side[2]) + 4 * sums.unit * np.abs(rows).sum(-1)
            off += np.where(inside, self.of_gl * nearest, 0.0).sum(-1)
            # Plain PyTorch counts all of it: what it loses in Σ_j ds is multiplied by that, now up and now down.
            terms = of_side[0] * away
            squares = np.einsum("bhts,bhts->bh", terms, terms) + np.where(inside, adrift, 0.0).sum(-1)
            found[(slice(None), *self.at[:2])] += result, off, squares


def _finite(x: np.ndarray) -> np.ndarray:
    """Rows with NaN or inf are zeros."""
    return np.where(np.isfinite(x).all(-1, keepdims=True), x, 0.0)
