"""The sums of `differential_truth.py` over a block of queries: weights, outputs, gradients, and their errors."""

from typing import TYPE_CHECKING

import numpy as np
from differential_calls import BITS, lse_dtype

if TYPE_CHECKING:
    from differential_truth import _Sums

TILE = 64
# One unit each for the difference, its sum with the linear bias and its sum with the product, plus one to spare.
BIAS_UNITS = 4


class Block:
    """Queries [b, h, t] and the keys that they see; scores, weights and values derived from them are [b, h, t, s]."""

    def __init__(self, sums: "_Sums", at: tuple[slice, slice, slice], keys: slice) -> None:
        b, h, t = at
        self.sums, self.at, self.keys = sums, at, (b, h, keys)
        self.seen, self.blind = sums.seen[b, h, t, keys], sums.blind[at]
        self.hidden = ~self.seen
        self.position = (sums.numbers.first[b, None] + np.arange(sums.call.query_len)[t])[:, None]
        distance = (self.position[..., None] - np.arange(sums.call.key_len)[keys]).astype(np.float64)  # [b, 1, t, s]
        self.away, self.to_right = np.abs(distance), distance < 0
        self.factors = None if sums.factors is None else sums.factors[b, h, t, keys]
        self.go, self.gl, self.of_go, self.of_gl = sums.go[at], sums.gl[at], sums.of_go[at], np.zeros(self.blind.shape)
        self.more_of_go = np.zeros(self.go.shape)  # error of the output's gradient, with a sink
        self.share = self.of_share = None

    def dropped(self, x: np.ndarray) -> np.ndarray:
        """Multiplies weights, or gradients of weights, by the factors of dropout."""
        return x if self.factors is None else x * self.factors

    def weigh(self) -> None:
        """Computes p and its error: from the errors of scores and of their log-sum-exp, and from skipping."""
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
        if call.bad == "seen":  # hidden entries may be the largest finite numbers
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
        if beyond.any():  # also if p itself has underflowed
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
        """Computes σ(lse − sink), the keys' share of the weights, and its error."""

        def sigmoid(x: np.ndarray) -> np.ndarray:
            small = np.exp(-np.abs(x))
            return np.where(x < 0, small, 1.0) / (1.0 + small)

        x, unit = lse - self.sums.sinks[:, self.at[1]], self.sums.unit
        off = of_lse + 2 * unit * np.abs(np.nan_to_num(x, posinf=0.0))
        self.share = sigmoid(x)
        self.of_share = np.maximum(sigmoid(x + off) - self.share, self.share - sigmoid(x - off))
        self.of_share += 4 * unit * self.share + self.sums.vanished

    def _put_sink(self) -> None:
        """Computes the sink's gradient, and converts the gradients of output and lse to those without a sink."""
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
        """Returns (scores, −inf at hidden keys; their magnitudes; errors other than those of magnitude and lse)."""
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
        """Accounts for skipping: only weights up to the tolerance may be skipped; the other weights grow."""
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
        """Adds Σ ds_ij over j < l ≤ i. Errors in rows and columns of ds do not cancel when only differences are summed."""
        b, h, _ = self.at
        before = np.arange(ds.shape[-1]) <= self.position[..., None]  # gate l may lie between query i and keys before l
        for found, x in ((self.sums.dgate, ds), (self.sums.of_dgate, of_ds)):
            found[b, h, 1:] += np.where(before[..., 1:], x.cumsum(-1)[..., :-1], 0.0).sum(-2)
        self.sums.gate_squares[b, h] += np.square(of_ds).sum((-1, -2))

    def _of_scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (gradients of scores; their errors; [b, h, t] plain PyTorch's error in their sum, in units)."""
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
        """Adds −Σ ds·|i − j| per side, with distances from the nearest key; Σ_j ds is the lse's gradient."""
        sums, call, away = self.sums, self.sums.call, self.away
        gl = self.gl
        nearest = np.where(self.seen, away, np.inf).min(-1)
        of_right = (self.seen & self.to_right).any(-1)
        of_left = (self.seen & ~self.to_right).any(-1)
        nearest = np.where(~(of_right & of_left) & ~self.blind, nearest, 0.0)
        # An implementation may count distances from about a tile around the keys; that count is rounded.
        outside = np.maximum(np.maximum(-self.position, self.position - call.key_len + 1) - TILE, 0)
        counted = away - outside[..., None]
        # The truth sums what exceeds the nearest distance; the gradient of lse contributes the rest.
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
            # Plain PyTorch uses whole distances: its rounding error in Σ_j ds, of either sign, is multiplied by them.
            terms = of_side[0] * away
            squares = np.einsum("bhts,bhts->bh", terms, terms) + np.where(inside, adrift, 0.0).sum(-1)
            found[(slice(None), *self.at[:2])] += result, off, squares
