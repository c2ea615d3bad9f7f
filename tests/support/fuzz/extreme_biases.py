"""Calls with isolated extreme key biases (10³ to 10³⁸, either sign) and possibly extreme slopes, and their truth.

The truth is dense and in float64. Biases of a row are relative to its best visible key, so float64 keeps their digits.
"""

import dataclasses
import math

import numpy as np
import torch

from alibi_attn import alibi_attention

# Allowed errors as a share of the largest entry. Weights have the rounding error of about 64 nats.
ALLOWED = {torch.float64: 1e-11, torch.float32: 4e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: tensors in float64 and the keyword arguments of `alibi_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slopes: torch.Tensor
    grad: torch.Tensor
    options: dict


def random_call(seed: int, *, plain: bool = False, most: int = 300) -> Call:
    """A call with extremes at random positions; with `plain`, slopes are not extreme."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    heads, key_len = kv_heads * group, int(rng.integers(2, most))
    query_len = key_len if rng.random() < 0.5 else int(rng.integers(1, most))
    causal = rng.random() < 0.6
    options: dict = {"causal": causal}
    offset = key_len - query_len
    if rng.random() < 0.25:
        offset = int(rng.integers(-query_len, key_len + 40))
        options["query_offset"] = offset
    if rng.random() < 0.3:
        options["window"] = int(rng.integers(1, 150))
    if rng.random() < 0.3:
        options["key_mask"] = torch.from_numpy(rng.random((batch, key_len)) < rng.choice([0.1, 0.5, 0.95]))
    if rng.random() < 0.3:
        of_key = torch.from_numpy(np.sort(rng.integers(0, 4, (batch, key_len)), axis=1))
        of_query = torch.from_numpy(rng.integers(0, 4, (batch, query_len)))
        inside = torch.arange(query_len) + offset
        near = of_key[:, inside.clamp(0, key_len - 1)]
        options["segment_ids"] = (torch.where(torch.rand(()) < 0.7, near, of_query), of_key)
    kinds = ["zero", "published", "negative", "mixed"] + ([] if plain else ["extreme"])
    slopes = slopes_of(str(rng.choice(kinds)), heads, rng)
    if not causal and rng.random() < 0.5:
        right = slopes_of(str(rng.choice(kinds)), heads, rng)
        right[rng.random(heads) < 0.3] = math.inf
        options["right_slopes"] = torch.from_numpy(right)
    if rng.random() < 0.9:
        options["key_bias"] = torch.from_numpy(biases_of((batch, heads, key_len), rng))
    draw = torch.Generator().manual_seed(seed)
    query, grad = torch.randn(2, batch, heads, query_len, 16, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, batch, kv_heads, key_len, 16, generator=draw, dtype=torch.float64)
    return Call(query, key, value, torch.from_numpy(slopes), grad, options)


def slopes_of(kind: str, heads: int, rng: np.random.Generator) -> np.ndarray:
    """[H] float64, exactly representable in float32."""
    found = {
        "zero": np.zeros(heads),
        "published": 2.0 ** -rng.integers(1, 9, heads),
        "negative": -(2.0 ** -rng.integers(1, 9, heads)),
        "mixed": rng.normal(size=heads),
        "extreme": rng.choice([-1.0, 1.0], heads) * 10.0 ** rng.uniform(20, 38.4, heads),
    }[kind]
    return found.astype(np.float32).astype(np.float64)


def biases_of(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """[B, H, S]: noise, a ramp or gates, with isolated extremes or cuts, and sometimes hidden keys."""
    found = rng.normal(size=shape) * 10.0 ** rng.integers(-2, 2)
    if rng.random() < 0.4:
        found = np.abs(rng.normal(size=shape)).cumsum(-1) * 10.0 ** rng.integers(-2, 2)
    for _ in range(int(rng.integers(1, 6))):
        at, size = int(rng.integers(shape[-1])), rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(2, 38.5)
        stop = shape[-1] if rng.random() < 0.4 else at + 1  # a cut, or one key
        found[..., at:stop] += size
    found = found.clip(-3.4e38, 3.4e38)
    if rng.random() < 0.3:
        found[rng.random(shape) < 0.2] = -math.inf
    return found.astype(np.float32).astype(np.float64)


def visible(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the keys that each query sees [B, H, T, S], i − j [T, S])."""
    t, s = call.query.shape[2], call.key.shape[2]
    options = call.options
    distance = torch.arange(t)[:, None] + options.get("query_offset", s - t) - torch.arange(s)
    seen = torch.ones(call.query.shape[0], call.query.shape[1], t, s, dtype=torch.bool)
    if options["causal"]:
        seen &= distance >= 0
    elif "right_slopes" in options:
        seen &= (distance >= 0) | options["right_slopes"].isfinite()[:, None, None]
    if "window" in options:
        seen &= distance.abs() < options["window"]
    if "key_mask" in options:
        seen &= options["key_mask"][:, None, None]
    if "segment_ids" in options:
        of_query, of_key = options["segment_ids"]
        seen &= (of_query[:, :, None] == of_key[:, None])[:, None]
    if "key_bias" in options:
        seen &= (options["key_bias"] > -math.inf)[:, :, None]
    return seen, distance


def truth(call: Call) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Returns (output, lse, gradients of query, key, value, slopes, key_bias), all float64."""
    leaves = _leaves(call, torch.float64)
    q, k, v, m, b = leaves
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen, distance = visible(call)
    m = m[:, None, None].expand(-1, *distance.shape)
    if "right_slopes" in call.options:
        right = call.options["right_slopes"].masked_fill(call.options["right_slopes"].isinf(), 0.0)
        m = torch.where(distance < 0, right[:, None, None], m)
    away = distance.abs()
    own = torch.zeros((), dtype=torch.float64) if b is None else b.masked_fill(b == -math.inf, 0.0)[:, :, None]
    nats = (own - m * away).masked_fill(~seen, -math.inf).detach().expand(seen.shape)
    best = nats.argmax(-1, keepdim=True)
    own, of_slope = own.expand(seen.shape), (m * away).expand(seen.shape)
    best_own, best_slope = own.gather(-1, best).detach(), of_slope.gather(-1, best).detach()
    scores = q @ k.mT * q.shape[-1] ** -0.5 + ((own - best_own) - (of_slope - best_slope))
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(blind, 0.0)
    output = (scores.softmax(-1) @ v).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores, -1) + (best_own - best_slope).squeeze(-1)
    lse = lse.masked_fill(blind.squeeze(-1), -math.inf)
    return output.detach(), lse.detach(), _gradients(output, call, leaves)


def answer(call: Call, backend: str, dtype: torch.dtype, attention=alibi_attention) -> tuple:
    """Returns the same results, computed by a backend."""
    leaves = _leaves(call, dtype)
    q, k, v, m, b = leaves
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {n: x.to(wide) if n == "right_slopes" else x for n, x in call.options.items() if n != "key_bias"}
    if b is not None:
        options["key_bias"] = b
    output, lse = attention(q, k, v, m, **options, backend=backend, return_lse=True)
    return output.detach(), lse.detach(), _gradients(output, call, leaves)


def assert_right(call: Call, backend: str, dtype: torch.dtype, attention=alibi_attention) -> None:
    """Asserts that output, lse and gradients are as accurate as without extremes."""
    rounded = dataclasses.replace(
        call, **{n: getattr(call, n).to(dtype).double() for n in ("query", "key", "value", "grad")}
    )
    output, lse, gradients = truth(rounded)
    ours, our_lse, our_gradients = answer(rounded, backend, dtype, attention)
    allowed = ALLOWED[dtype]
    _assert_close("output", ours, output, allowed * max(1.0, float(call.value.abs().max())))
    finite = lse > -math.inf
    assert bool((our_lse[~finite] == -math.inf).all()), "lse of a query that sees nothing"
    # lse is returned with the bias added back, so it has the precision of a number of its size, and may overflow.
    held = torch.finfo(our_lse.dtype)
    finite &= lse.abs() < held.max
    off = (our_lse.double() - lse)[finite].abs() - (4 * held.eps * lse[finite].abs() + min(allowed, 4e-4))
    assert bool((off <= 0).all()), f"lse is off by {float(off.max()):.2e} too much"
    size = max(1.0, float(call.grad.abs().max() * call.value.norm(dim=-1).max() * call.key.norm(dim=-1).max()))
    for name, ours, right in zip(
        ("query", "key", "value", "slopes", "key_bias"), our_gradients, gradients, strict=True
    ):
        far = call.key.shape[2] + call.query.shape[2] if name == "slopes" else 1
        if right is not None:
            most = float(right.abs().max()) if right.numel() else 0.0
            _assert_close(f"gradient of {name}", ours, right, allowed * (most + size * far))


def _assert_close(name: str, ours: torch.Tensor, right: torch.Tensor, allowed: float) -> None:
    assert bool(ours.isfinite().all()), f"{name} is not finite"
    error = float((ours.double() - right).abs().max()) if right.numel() else 0.0
    assert error <= allowed, f"{name} is off by {error:.2e}, allowed are {allowed:.2e}"


def _leaves(call: Call, dtype: torch.dtype) -> list:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.to(dtype) for x in (call.query, call.key, call.value)] + [call.slopes.to(wide)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    b = call.options.get("key_bias")
    return [*leaves, None if b is None else b.to(wide).clone().requires_grad_()]


def _gradients(output: torch.Tensor, call: Call, leaves: list) -> list:
    given = [x for x in leaves if x is not None]
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in given] + [None] * (5 - len(given))
    found = torch.autograd.grad(output, given, call.grad.to(output.dtype), allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]
    return gradients + [None] * (5 - len(given))
