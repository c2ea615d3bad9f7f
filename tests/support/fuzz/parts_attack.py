"""Attacks calls in parts in JAX: the mass that they drop, and outputs and gradients against float64.

The draws are those of `certificate_attack.py` with its `parts`, and queries anywhere, key biases and dropout in some of them. The
allowed errors are a forward error analysis as in `differential_truth.py`: a score is off by e nats, so a weight by a factor of
exp(±e), and every sum is off by a few units of the sum of its terms' magnitudes. Where e exceeds `ROUGH`, only the dropped mass
is checked.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from certificate_attack import Attack, random_attack
from dropout_oracle import factors
from jax_keys import keys_read
from parts_oracle import seen_and_bias

from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.jax import alibi_attention, attention
from alibi_attn.jax.call import merging
from alibi_attn.jax.call.operands import operands
from alibi_attn.jax.call.validation import make_spec

ROUGH = 0.3
EXPONENTIAL = {True: 2.0**-51, False: 2.0**-22}  # relative error in fp64 and fp32
DROPOUT = 0.25
LENGTHS, HEAD_DIMS, SINKS, NEAR = (33, 130, 333), (3, 8), (1, 16, 39), 64
LOOP = {"length": 96, "head_dim": 4, "group": 2, "dtype": "float32", "tile": 8}  # the one shape of the loop
NAMES = "output", "lse", "query", "key", "value", "slopes"


def drawn(seed: int, *, loop: bool = False) -> Attack:
    """The attack of a seed, in few shapes, so that JAX compiles less."""
    attack = random_attack(seed, parts=True, biased=seed % 4 == 3)
    few = {
        "length": LENGTHS[attack.length % len(LENGTHS)],
        "head_dim": HEAD_DIMS[attack.head_dim % len(HEAD_DIMS)],
        "group": 2,
    }
    few = {name: x for name, x in LOOP.items() if name != "tile"} if loop else few
    return dataclasses.replace(attack, **few)


class Call:
    """One attack as arguments of JAX's function, and its weights in float64."""

    def __init__(self, attack: Attack) -> None:
        tensors, given = attack.inputs()
        rng = np.random.default_rng([attack.seed, 3])
        given = {name: x for name, x in given.items() if name not in ("tolerance", "return_lse", "dropout_p")}
        given["sinks"] = SINKS[given["sinks"] % len(SINKS)] if given["sinks"] else 0
        self.dropout_p, self.dtype = DROPOUT if rng.random() < 0.2 else 0.0, attack.dtype
        wide = attack.dtype == "float64"
        if given["key_bias"] is not None and not wide:
            given["key_bias"] = given["key_bias"].float()
        if given["positions"] is not None and not wide:  # what JAX makes of numpy's fp64 without x64
            given["positions"] = (given["positions"] - given["positions"][:, -1:]).float()
        self.anywhere = given["positions"] is not None and not given["causal"] and rng.random() < 0.7
        if self.anywhere:
            at = given["positions"].double().numpy()
            own = np.sort(rng.uniform(at.min() - 3, at.max() + 3, tensors[0].shape[2]))[None]
            given |= {"query_positions": torch.tensor(own).to(given["positions"].dtype), "window": None, "sinks": 0}
        self.tensors, self.given = tensors, given
        self.work = 2.0**-53 if wide else 2.0**-24
        self.stored = 2.0**-9 if attack.dtype == "bfloat16" else self.work
        self.q, self.k, self.v = (x[0].double().numpy() for x in tensors[:3])
        self.q, self.k, self.v = self.q, self.k[0], self.v[0]  # one key head
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._weigh()

    def arguments(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        narrow = self.tensors[0].dtype == torch.bfloat16
        rows = [x.transpose(1, 2).float().numpy() if narrow else x.transpose(1, 2).numpy() for x in self.tensors[:3]]
        rows = [jnp.asarray(x, jnp.bfloat16 if narrow else x.dtype) for x in rows]
        given = {
            n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in self.given.items() if x is not DEFAULTS[n]
        }
        return [*rows, jnp.asarray(self.tensors[3].numpy(), jnp.float64 if self.work < 1e-10 else jnp.float32)], given

    def _weigh(self) -> None:
        options = {name: x for name, x in self.given.items() if name not in ("scale", "sink_logits")}
        seen, bias = seen_and_bias(*self.tensors[:2], self.tensors[3], **options)
        self.seen, bias = seen[0].numpy(), bias[0].expand(seen[0].shape).numpy()
        self.scale = self.q.shape[-1] ** -0.5
        self.score = np.where(self.seen, self.scale * self.q @ self.k.T + bias, -np.inf)
        top = self.score.max(-1, initial=-1e300, keepdims=True)
        weight = np.exp(self.score - top)
        total = weight.sum(-1, keepdims=True)
        self.p = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
        self.lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
        # The rounding error of a score. Its bias is relative to that of a key in the query's tile; products of slopes and
        # distances are not, nor is anything in fp64: the truth rounds there too.
        best = np.where(self.seen, bias, -np.inf).max(-1, initial=-1e300, keepdims=True)
        given = self.given["positions"], self.given["key_bias"]
        whole = np.abs(bias) if self.work < 1e-10 or given == (None, None) else 0.0
        dots = self.lost(self.q.shape[-1]) * self.scale * np.abs(self.q) @ np.abs(self.k).T
        wide = best - np.where(self.seen, bias, best) + self._range_of_tiles()[..., None] + whole
        self.e = np.where(self.seen, dots + 8 * self.work * wide, 0.0)
        self.factor = np.ones_like(self.p) if self.dropout_p == 0 else self._factors()

    def _range_of_tiles(self) -> np.ndarray:
        """[H, T]: how much the biases of keys differ next to each query, by positions and key biases."""
        found, s, t = np.zeros(self.score.shape[:2]), self.k.shape[0], self.q.shape[1]
        rank = np.clip(np.arange(t) + s - t, 0, s - 1)
        if self.given["positions"] is not None:
            at, rank_here = self.given["positions"][0].double().numpy(), rank
            if self.given["query_positions"] is not None:
                own = self.given["query_positions"][0].double().numpy()
                at = np.sort(np.concatenate([at, own]))
                rank_here = np.searchsorted(at, own)
            low, high = np.maximum(rank_here - NEAR, 0), np.minimum(rank_here + NEAR, len(at) - 1)
            m = self.tensors[3].double().numpy()
            right = self.given["right_slopes"]
            sizes = at[high] - at[low]
            if self.work < 1e-10:  # fp64 has no wider sums, and positions are relative to the last
                sizes = sizes + at[-1] - at[0]
            found += (m if right is None else np.maximum(m, right))[:, None] * sizes
        if self.given["key_bias"] is not None:
            finite = self.given["key_bias"][0].double().numpy()
            finite = np.where(np.isfinite(finite), finite, np.nan)
            first = s - t if self.given["query_offset"] is None else self.given["query_offset"]
            for i in range(t):
                near = finite[:, min(max(first + i - NEAR, 0), s - 1) : min(max(first + i + NEAR, 1), s)]
                found[:, i] += np.nan_to_num(np.nanmax(near, -1) - np.nanmin(near, -1))
        return found

    def _factors(self) -> np.ndarray:
        """[H, T, S]."""
        heads, t, s = self.p.shape
        first = s - t if self.given["query_offset"] is None else self.given["query_offset"]
        i, sizes = first + np.arange(t), {"batch": 1, "heads": heads, "key_len": s}
        return factors(self.seed(), self.dropout_p, positions=i[None], **sizes)[0].numpy()

    def seed(self) -> int:
        return 2**33 + 17

    def lost(self, terms: int) -> float:
        """The rounding error of a sum, as a share of the sum of its terms' magnitudes."""
        return (4 + terms**0.5) * self.work

    def is_rough(self) -> bool:
        return not float(np.nan_to_num(self.e, nan=np.inf).max(initial=0.0)) < ROUGH

    def truth(self, go: np.ndarray, gl: np.ndarray, tolerance: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(exact, allowed error) by name, for the gradients go [H, T, D] and gl [H, T] of output and lse."""
        p, e, v, k, q, f = self.p, self.e, self.v, self.k, self.q, self.factor
        s, d, t = k.shape[0], k.shape[1], q.shape[1]
        see = self.seen.any(-1)
        go, gl = np.where(see[..., None], go, 0.0), np.where(see, gl, 0.0)
        off = np.expm1(e + (p * e).sum(-1, keepdims=True) + self.lost(s) + 2 * EXPONENTIAL[self.work < 1e-10])
        of_p = p * off + np.minimum(p, tolerance)  # of a weight, which may also be dropped
        output, most = (f * p) @ v, (f * p) @ np.abs(v)
        of_output = (f * of_p) @ np.abs(v) + (self.lost(s) + 6 * self.stored) * most
        lse = self.lse
        of_lse = (p * e).sum(-1) + self.lost(s) + 8 * self.work * np.abs(np.where(see, lse, 0.0)) + 2 * tolerance
        # ds = p·(f·do·v − δ), δ = do·o − dlse; parts subtract their own outputs, which are at most the largest value.
        largest = np.where(self.seen[..., None], np.abs(v), 0.0).max(2, initial=0.0) * f.max(initial=0.0)
        bound = (np.abs(go) * largest).sum(-1)[..., None] + np.abs(gl)[..., None]
        ds = p * (f * (go @ v.T) - ((go * output).sum(-1) - gl)[..., None])
        terms = f * (np.abs(go) @ np.abs(v).T) + bound
        of_ds = of_p * terms + p * (self.lost(d) + self.lost(s) + 8 * self.stored) * terms
        of_ds += p * (np.abs(go) * of_output).sum(-1)[..., None]
        sides = {"query": (ds @ k, of_ds @ np.abs(k), np.abs(ds) @ np.abs(k), s)}
        of_key = [np.einsum("hts,htd->sd", x, y) for x, y in ((ds, q), (of_ds, np.abs(q)), (np.abs(ds), np.abs(q)))]
        sides["key"] = (*of_key, t * len(q))
        size = np.einsum("hts,htd->sd", f * p, np.abs(go))
        sides["value"] = (
            np.einsum("hts,htd->sd", f * p, go) / self.scale,
            np.einsum("hts,htd->sd", f * of_p, np.abs(go)) / self.scale,
            size / self.scale,
            t * len(q),
        )
        found = {"output": (output, of_output), "lse": (lse, of_lse)}
        for name, (exact, error, magnitude, terms_of) in sides.items():
            error = error + (self.lost(terms_of) + 4 * self.stored) * magnitude
            found[name] = self.scale * exact, self.scale * error
        found["slopes"] = self._of_slopes(ds, of_ds)
        return found

    def _of_slopes(self, ds: np.ndarray, of_ds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s, t = self.k.shape[0], self.q.shape[1]
        first = s - t if self.given["query_offset"] is None else self.given["query_offset"]
        i, j = (first + np.arange(t)[:, None]).astype(float), np.arange(s)[None].astype(float)
        is_right = i < j
        size = np.abs(i - j)
        if self.given["positions"] is not None:
            at = self.given["positions"][0].double().numpy()
            own = (
                at[s - t :]
                if self.given["query_positions"] is None
                else self.given["query_positions"][0].double().numpy()
            )
            i, j = own[:, None], at[None]
            is_right = i < j if self.anywhere else is_right
            size = np.abs(i - at[-1]) + np.abs(j - at[-1])
        distance = np.abs(i - j)
        mine = ~is_right if self.given["right_slopes"] is not None else np.ones_like(is_right)
        exact, error = -(ds * distance * mine).sum((1, 2)), (of_ds * size * mine).sum((1, 2))
        return exact, error + self.lost(s * t) * (np.abs(ds) * size * mine).sum((1, 2))


def kept_keys(whole: merging.Part, backend: str) -> np.ndarray:
    """[H, T, S] bool: the keys that each query of a call of one sequence reads."""
    numbers = jnp.arange(1.0, whole.spec.key_len + 1)[None, :, None, None]
    return _kept(whole, whole._replace(value=jnp.broadcast_to(numbers, whole.key.shape)), whole.spec.key_len, backend)


def _kept(part: merging.Part, numbered: merging.Part, key_len: int, backend: str) -> np.ndarray:
    """`numbered` has the number of each key in the whole call, from 1, in place of its value; 0 = none."""
    spec = part.spec
    kept = np.zeros((spec.num_heads, spec.query_len, key_len), bool)
    if not attention.splits(spec, backend):
        if 0 in (spec.query_len, spec.key_len):
            return kept
        numbers = np.asarray(numbered.value[0, :, 0, 0]).astype(int)
        kept[:, :, numbers[numbers > 0] - 1] = _read(part, backend)[:, :, numbers > 0]
        return kept
    whole = (merging.Part(x.spec, x.query, x.key, x.value, origin=x.origin) for x in (part, numbered))
    for one, other in zip(*map(merging.parts, whole), strict=True):
        found = _kept(one, other, key_len, backend)
        if one.places is not None:
            found = found[:, np.asarray(one.places[0])]
        found = found[:, ::-1] if one.is_reversed else found
        kept[slice(None) if one.heads is None else list(one.heads)] |= found
    return kept


def _read(part: merging.Part, backend: str) -> np.ndarray:
    """[H, T, S] of a call without parts."""
    spec = part.spec
    plan = attention.make_plan(spec, part.query, backend)
    arrays, rest = operands(spec, part.query, part.key, part.value, None)
    rest = rest._replace(key_bias_low=part.key_bias_low, query_bias_low=part.query_bias_low)
    return next(keys_read(plan, spec, *attention._forward(plan, arrays, rest)[3:]))[0].numpy()


def assert_mass(call: Call, attack: Attack, backend: str, *, careless: float = 1.0) -> tuple[float, float]:
    """Asserts that no query drops more than the tolerance; returns (the largest share of it, the share of keys skipped)."""
    arrays, given = call.arguments()
    tolerance = min(0.99, careless * attack.tolerance)
    spec = make_spec(*arrays, tolerance=tolerance, **given)
    kept = kept_keys(merging.Part(spec, *arrays[:3]), backend)
    skipped = call.seen & ~kept
    lost = float((call.p * skipped).sum(-1).max(initial=0.0))
    assert lost <= attack.tolerance, f"{lost:.3g} is dropped, more than {attack.tolerance:.3g}: {attack}"
    return lost / attack.tolerance, float(skipped.sum() / max(1, call.seen.sum()))


def assert_results(call: Call, attack: Attack, backend: str) -> dict[str, float]:
    """Asserts that output, lse and gradients are within their errors; returns the largest error of each as a share of them."""
    rng = np.random.default_rng([attack.seed, 4])
    arrays, given = call.arguments()
    if call.dropout_p:
        words = jnp.asarray([call.seed() >> 32, call.seed() % 2**32], jnp.uint32)
        given |= {"dropout_p": call.dropout_p, "dropout_key": words}

    def attend(*arrays: jax.Array) -> Any:
        return alibi_attention(*arrays, return_lse=True, backend=backend, **given)

    (output, lse), pull = jax.vjp(attend, *arrays)
    go = jnp.asarray(rng.standard_normal(output.shape), output.dtype)
    gl = jnp.asarray(rng.standard_normal(lse.shape), lse.dtype)
    found = dict(zip(NAMES, (output, lse, *pull((go, gl))), strict=True))
    eps = {2.0**-53: 2.0**-52, 2.0**-24: 2.0**-23, 2.0**-9: 2.0**-7}[call.stored]
    go, gl = (np.asarray(x[0], np.float64) for x in (go, gl))
    true, shares = call.truth(go.swapaxes(0, 1), gl, eps / 32), {}
    for name, (exact, error) in true.items():
        got = np.asarray(found[name], np.float64)
        got = (
            got[0].swapaxes(0, 1) if name in ("output", "query") else got[0, :, 0] if name in ("key", "value") else got
        )
        got = got[0] if name == "lse" else got
        with np.errstate(invalid="ignore"):
            off = np.where(got == exact, 0.0, np.abs(got - exact))
        shares[name] = float((off / (error + 1e-30)).max(initial=0.0))
        assert shares[name] <= 1, f"{name} is off by {shares[name]:.3g} of its error: {attack}"
    return shares


def run(attack: Attack, backend: str) -> tuple[float, float, dict[str, float]]:
    """(The largest share of the tolerance that a query drops, the share of keys skipped, errors as shares of the allowed)."""
    with jax.enable_x64(attack.dtype == "float64"):
        call = Call(attack)
        return *assert_mass(call, attack, backend), {} if call.is_rough() else assert_results(call, attack, backend)
