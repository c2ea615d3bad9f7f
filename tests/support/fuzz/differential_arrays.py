"""The numbers, tensors and visible pairs of a random call; nothing here is imported from the package."""

import dataclasses
import math
import zlib

import numpy as np
import torch
from differential_calls import Call, lse_dtype, slopes_dtype
from torch import Tensor

GATE_FLOOR = -(2.0**20)  # per the contract: a smaller gate is clamped to this, and has no gradient
ONE_STORED = {"same batch": 0, "same head": 1, "same row": 2}  # the axis of which a layout stores one entry
LARGEST = 1e33  # keeps Σ exp(s − m)·v, the sum of every flash attention, finite in fp32


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """The numbers of a call in float64, exactly representable in its dtype."""

    query: np.ndarray  # [B, H, T, D]
    key: np.ndarray  # [B, K, S, D]
    value: np.ndarray  # [B, K, S, D]
    slopes: np.ndarray  # [H] or [B, H]
    right_slopes: np.ndarray | None
    first: np.ndarray  # [B] position of query 0
    key_mask: np.ndarray | None  # [B, S]
    query_segments: np.ndarray | None  # [B, T]
    key_segments: np.ndarray | None  # [B, S]
    grad_output: np.ndarray  # [B, H, T, D]
    grad_lse: np.ndarray  # [B, H, T]
    key_bias: np.ndarray | None = None  # [B, H, S], or a shape that broadcasts to it: [H, S], [B, 1, S], [S]
    log_fgate: np.ndarray | None = None  # [B, H, S] or [B, K, S]
    sink_logits: np.ndarray | None = None  # [H]

    def bias_of_keys(self, call: Call) -> np.ndarray:
        """[B, H, S], zeros without a bias."""
        return np.broadcast_to(0.0 if self.key_bias is None else self.key_bias, (call.batch, call.heads, call.key_len))

    def gates_of(self, call: Call) -> np.ndarray:
        """[B, H, S], zeros without gates; closed gates are clamped as the contract requires."""
        if self.log_fgate is None:
            return np.zeros((call.batch, call.heads, call.key_len))
        gates = np.repeat(self.log_fgate, call.heads // self.log_fgate.shape[1], 1)
        return np.where(gates > -np.inf, np.maximum(gates, GATE_FLOOR), gates)

    def distance(self) -> np.ndarray:
        """[B, T, S] i − j."""
        t, s = self.query.shape[2], self.key.shape[2]
        return (self.first[:, None] + np.arange(t))[:, :, None] - np.arange(s)

    def seen(self, call: Call) -> np.ndarray:
        """[B, H, T, S]: the pairs in which the query may see the key."""
        t, s = self.query.shape[2], self.key.shape[2]
        position, at = (self.first[:, None] + np.arange(t))[:, None, :, None], np.arange(s)
        seen = at <= position if call.causal else np.ones((call.batch, 1, t, s), bool)
        if call.window is not None:
            seen &= at > position - call.window
            if not call.causal:
                seen &= at < position + call.window
        if self.key_mask is not None:
            seen &= self.key_mask[:, None, None]
        if self.key_segments is not None and self.query_segments is not None:
            seen &= self.query_segments[:, None, :, None] == self.key_segments[:, None, None]
        if self.right_slopes is not None:
            never = np.isinf(np.broadcast_to(self.right_slopes, (call.batch, call.heads)))
            if never.any():
                seen = seen & ~(never[:, :, None, None] & (at > position))
        if self.key_bias is not None:
            seen = seen & (self.bias_of_keys(call) > -np.inf)[:, :, None]
        if self.log_fgate is not None:  # a gate of −inf is a cut: queries from there on do not see earlier keys
            cuts = np.isneginf(self.gates_of(call)).cumsum(-1)
            of_query = np.take_along_axis(cuts, np.broadcast_to(position[..., 0], (call.batch, call.heads, t)), -1)
            seen = seen & (of_query[..., None] == cuts[:, :, None])
        return np.broadcast_to(seen, (call.batch, call.heads, t, s))


def seen_keys(call: Call, seen: np.ndarray) -> np.ndarray:
    """[B, K, S]: the keys that some query of some head sees, from [B, H, T, S]."""
    return seen.any(2).reshape(call.batch, call.kv_heads, call.group, call.key_len).any(2)


def arrays(call: Call) -> Arrays:
    """Every number of the call. Each field has its own random stream, so that changing one leaves the others unchanged."""

    def stream(name: str) -> np.random.Generator:
        return np.random.default_rng([call.seed, zlib.crc32(name.encode())])

    b, h, k, t, s, d = call.batch, call.heads, call.kv_heads, call.query_len, call.key_len, call.head_dim
    first = np.full(b, s - t if call.offset is None else call.offset)
    if call.offset is not None and call.offset_as == "batch":
        first[1:] += stream("offset").integers(-t - 2, s + 3, max(0, b - 1))
    query = stream("query").standard_normal((b, h, t, d)) * call.peaked * call.size_query
    key = stream("key").standard_normal((b, k, s, d)) * call.size_key
    value = stream("value").standard_normal((b, k, s, d)) * call.size_value
    for x, factor, name in ((key, call.outlier_key, "outlier key"), (value, call.outlier_value, "outlier value")):
        rng = stream(name)
        at = rng.random((b, k, s)) < rng.choice([0.02, 0.3, 1 / max(1, s)])
        at[..., int(rng.integers(max(1, s))) :][..., :1] = True
        x[at] *= factor
    grad_output = stream("grad").standard_normal((b, h, t, d))
    if call.layout_grad in ("zero", "one number"):
        grad_output[:] = 0.0 if call.layout_grad == "zero" else 1.0
    grad_lse = stream("grad lse").standard_normal((b, h, t))
    of_query, of_key = _segments(call, stream("segments"), first)
    found = Arrays(
        *(
            _alike(call, name, _rounded(x, call.dtype))
            for name, x in (("query", query), ("key", key), ("value", value))
        ),
        slopes=_of_one(call, _slopes(call, stream("slopes"))),
        right_slopes=_of_one(call, _right(call, stream("right"))),
        first=first,
        key_mask=_of_one(call, _mask(call, stream("mask"))),
        query_segments=_of_one(call, of_query),
        key_segments=_of_one(call, of_key),
        grad_output=_alike(call, "grad", _rounded(grad_output, call.dtype)),
        grad_lse=_of_one(call, _rounded(grad_lse, lse_dtype(call))),
        key_bias=_key_bias(call, stream("key bias")),
        log_fgate=_gates(call, stream("gates")),
        sink_logits=_sinks(call, stream("sinks")),
    )
    _spoil(call, found, stream("bad"))
    return dataclasses.replace(found, value=found.key) if call.value_is_key else found


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    kind = getattr(torch, dtype)
    most = min(torch.finfo(kind).max, LARGEST)
    return torch.from_numpy(np.clip(x, -most, most)).to(kind).double().numpy()


def _alike(call: Call, name: str, x: np.ndarray) -> np.ndarray:
    """[B, H, T, D], with equal numbers along an axis that the layout stores only once."""
    axis = ONE_STORED.get(getattr(call, f"layout_{name}"))
    return x if axis is None or x.size == 0 else np.repeat(np.take(x, [0], axis), x.shape[axis], axis)


def _of_one(call: Call, x: np.ndarray | None) -> np.ndarray | None:
    """[B, ...], with equal numbers for all sequences if the layout stores only one sequence."""
    same = call.layout_masks == "same batch"
    return np.repeat(x[:1], len(x), 0) if same and x is not None and x.ndim > 1 else x


def _slopes(call: Call, rng: np.random.Generator) -> np.ndarray:
    """[H] or [B, H]."""
    h = call.heads
    if call.gates is not None and call.slopes_as == "none":
        return np.zeros(h)
    whole = 2 ** int(math.log2(h))
    published = 2.0 ** (-8 / whole * np.arange(1, whole + 1))
    published = np.concatenate([published, 2.0 ** (-4 / whole * np.arange(1, 2 * whole + 1, 2))])[:h]
    random = 2.0 ** rng.uniform(-8, 1, h)
    some = rng.random(h) < 0.5
    some[int(rng.integers(h))] = True
    drawn = {
        "random": random,
        "published": published,
        "batch": 2.0 ** rng.uniform(-8, 1, (call.batch, h)),
        "zero": np.where(some, 0.0, random),
        "negative": np.where(some, -0.1 * rng.random(h), random),
        "steep negative": np.where(some, -rng.choice([0.1, 0.5, 2.0], h), random),
        "huge": np.where(some, 1e4, random),
        "enormous": np.where(some, 1e30, random),
        "extreme": np.where(some, rng.choice([3e38, 1e37], h), random),
        "vanishing": np.where(some, 1e-30, random),
        "mixed": rng.choice([0.0, -0.5, -0.01, 1e-3, 0.1, 1.0, 8.0, 1e4], (call.batch, h)),
    }[call.slopes]
    return drawn.astype(np.float32).astype(float) if call.slopes == "extreme" else _rounded(drawn, _rounds_to(call))


def _rounds_to(call: Call) -> str:
    """The dtype that slopes are rounded to."""
    return slopes_dtype(call) if call.dtype == "float64" or call.slopes_as == "low" else "float32"


def _right(call: Call, rng: np.random.Generator) -> np.ndarray | None:
    if call.right is None:
        return None
    h, random = call.heads, 2.0 ** rng.uniform(-8, 1, call.heads)
    some = rng.random(h) < 0.5
    drawn = {
        "random": random,
        "batch": 2.0 ** rng.uniform(-8, 1, (call.batch, h)),
        "inf": np.where(some, np.inf, random),
        "all inf": np.full(h, np.inf),
        "zero": np.where(some, 0.0, random),
        "negative": np.where(some, -rng.choice([0.01, 0.1, 0.5], h), random),
        "steep": np.where(some, 1e4, random),
    }[call.right]
    finite = np.isfinite(drawn)
    return np.where(finite, _rounded(np.where(finite, drawn, 0.0), _rounds_to(call)), drawn)


def _sinks(call: Call, rng: np.random.Generator) -> np.ndarray | None:
    if call.sinks is None:
        return None
    noise = 3 * rng.standard_normal(call.heads)
    if call.sinks == "huge":
        noise = 1e4 * rng.choice([-1.0, 1.0], call.heads)
    if call.sinks == "some none":
        noise = np.where(rng.random(call.heads) < 0.5, -np.inf, noise)
    return noise.astype(np.float32).astype(np.float64)


def _key_bias(call: Call, rng: np.random.Generator) -> np.ndarray | None:
    """A bias for every key, in the shape that is passed to the call."""
    if call.key_bias is None:
        return None
    b, h, s = call.batch, call.heads, call.key_len
    shape = {"BHS": (b, h, s), "HS": (h, s), "B1S": (b, 1, s), "S": (s,)}[call.key_bias_shape]
    noise, some = rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 1.5), rng.random(shape)
    closed = np.log1p(np.exp(-rng.normal(rng.uniform(-2, 6), 1, shape)))  # −ln of a sigmoid
    hidden = some < rng.uniform(0.05, 0.95)
    if rng.random() < 0.3:  # all keys of some heads
        hidden |= rng.random((*shape[:-1], 1)) < 0.4
    drawn = {
        "noise": noise,
        "gates": np.cumsum(closed, -1),
        "steep gates": np.cumsum(closed * 60 * rng.random(), -1),
        "rising": -np.cumsum(np.abs(noise), -1),
        "spikes": noise + 80.0 * (some < 4 / max(1, s)),
        "hidden": np.where(hidden, -np.inf, noise),
        "wide": noise + 1e6 * rng.choice([-1.0, 1.0]) + rng.choice([0.0, 1e6]) * (some < 0.02),
        "constant": np.full(shape, rng.normal() * 1e6),
        "isolated": noise + _isolated(rng, shape) * rng.choice([-1.0, 1.0], shape),
    }[call.key_bias]
    if call.layout_key_bias == "same batch" and call.key_bias_shape in ("BHS", "B1S"):
        drawn = np.repeat(drawn[:1], b, 0)
    return drawn.astype(call.key_bias_as).astype(np.float64)


def _isolated(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """1e3 to 3e38 for one to five of the last axis, 0 for the others."""
    sizes, count = 10.0 ** rng.uniform(3, rng.choice([8, 38.5]), shape), int(rng.integers(1, 6))
    return np.where(rng.random(shape).argsort(-1).argsort(-1) < count, sizes, 0.0)


def _gates(call: Call, rng: np.random.Generator) -> np.ndarray | None:
    """ln f of every position, at most 0."""
    if call.gates is None:
        return None
    shape = (call.batch, call.heads if call.gates_shape == "BHS" else call.kv_heads, call.key_len)
    drawn = -np.log1p(np.exp(-rng.normal(rng.uniform(-2, 6), 1, shape)))
    if call.gates in ("isolated", "both"):
        drawn -= _isolated(rng, shape)
    if call.gates in ("cuts", "both"):
        drawn[_isolated(rng, shape) > 0] = -np.inf
    return drawn.astype(call.gates_as).astype(np.float64)


def _mask(call: Call, rng: np.random.Generator) -> np.ndarray | None:
    b, s = call.batch, call.key_len
    at, cut = np.arange(s), rng.integers(0, s + 1, (b, 1))
    some = rng.random((b, s))
    return {
        None: None,
        "random": some < 0.6,
        "sparse": some < 0.05,
        "left": at >= cut,
        "right": at < cut,
        "all": np.zeros((b, s), bool),
        "one": at == rng.integers(0, max(1, s), (b, 1)),
    }[call.mask]


def _segments(call: Call, rng: np.random.Generator, first: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    if call.segments is None:
        return None, None
    names = {
        "few": np.arange(4),
        "negative": np.array([-7, -1, 0, 3]),
        "large": np.array([-(2**62), 5, 2**32 + 5, 2**63 - 1]),
    }[call.segment_ids]
    of_key = rng.integers(0, 3, (call.batch, call.key_len))
    of_query = rng.integers(0, 4, (call.batch, call.query_len))
    if call.segments == "sorted":
        of_key, of_query = np.sort(of_key, 1), np.sort(of_query, 1)
    if call.segments_as == "one" and call.batch:
        of_query = of_key[:, first[0] : first[0] + call.query_len]
    return names[of_query], names[of_key]


def _spoil(call: Call, found: Arrays, rng: np.random.Generator) -> None:
    """Puts NaN, inf and the largest finite numbers in places where they must have no effect."""
    if call.bad is None:
        return
    seen = found.seen(call)
    free = ~seen_keys(call, seen)
    if call.bad == "seen":
        free |= rng.random(free.shape) < 0.05
    blind = ~seen.any(3)
    if call.bad == "seen":
        blind |= rng.random(blind.shape) < 0.02
    for name, at, share in (("query", blind, 0.7), ("key", free, 0.7), ("value", free, 0.7)):
        x = getattr(found, name)
        axis = ONE_STORED.get(getattr(call, f"layout_{name}"))
        at = at & (rng.random(at.shape) < share)
        if axis is not None:
            at = np.repeat(at.all(axis, keepdims=True), at.shape[axis], axis)
        most = torch.finfo(getattr(torch, call.dtype)).max  # finite values there must not be used either
        x[at, : rng.choice([1, x.shape[-1]])] = rng.choice([np.nan, np.inf, -np.inf, most, -most])


def laid_out(x: np.ndarray, layout: str, dtype: torch.dtype) -> Tensor:
    """The numbers [B, H, T, D] with the strides of a layout; the memory between them is NaN."""
    b, h, t, d = x.shape
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)

    def inside(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    if layout in ONE_STORED:
        axis = ONE_STORED[layout]
        if x.shape[axis] == 0:
            return tensor
        return tensor.narrow(axis, 0, 1).contiguous().expand(b, h, t, d)
    if layout in ("negative", "imaginary"):
        return _negative(tensor, imaginary=layout == "imaginary" and dtype in (torch.float32, torch.float64))
    views = {
        "transposed": lambda: inside(b, t, h, d).transpose(1, 2),
        "packed": lambda: inside(b, t, 3, h, d)[:, :, 1].transpose(1, 2),
        "rows apart": lambda: inside(b, h, 2 * t + 1, d)[:, :, 1::2],
        "heads apart": lambda: inside(b, h + 2, t, d)[:, 1:-1],
        "padded": lambda: inside(b, h, t, d + 5)[..., :d],
        "columns": lambda: inside(b, h, d, t).mT,
        "columns apart": lambda: inside(b, h, t, 2 * d)[..., ::2],
        "from the middle": lambda: inside(b, h, t + 3, d)[:, :, 3:],
    }
    if layout not in views:
        return tensor
    view = views[layout]()
    view.copy_(tensor)
    return view


def _negative(tensor: Tensor, *, imaginary: bool = False) -> Tensor:
    """The same numbers, stored with the opposite sign: a view with the negative bit, as of a conjugate's imaginary
    part.
    """
    if imaginary:
        return torch.complex(torch.full_like(tensor, math.nan), -tensor).conj().imag
    return torch._neg_view(-tensor)


def beside(x: np.ndarray, layout: str, dtype: torch.dtype) -> Tensor:
    """Lays out masks, segments, slopes, biases, gates and gradients of lse; the memory between floats is NaN."""
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    if layout == "same batch" and x.ndim > 1:
        return tensor[:1].clone().expand(x.shape)
    if layout == "negative" and dtype.is_floating_point:
        return _negative(tensor)
    if layout == "transposed":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "apart":
        wide = tensor.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan if dtype.is_floating_point else 1)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    return tensor


def key_bias_of(call: Call, numbers: Arrays) -> Tensor | None:
    """The key bias with the strides of its layout."""
    if numbers.key_bias is None:
        return None
    is_shared = call.layout_key_bias == "same batch" and call.key_bias_shape not in ("BHS", "B1S")
    layout = "contiguous" if is_shared else call.layout_key_bias
    return beside(numbers.key_bias.copy(), layout, getattr(torch, call.key_bias_as))


def gates_of(call: Call, numbers: Arrays) -> Tensor:
    """The gates with the strides of their layout."""
    assert numbers.log_fgate is not None
    return beside(numbers.log_fgate.copy(), call.layout_gates, getattr(torch, call.gates_as))
