"""Runs a PyTorch backend on a case and compares it with the truth; test_conformance proves the checkers can fail."""

import functools
import math

import torch
from attention_cases import Case
from attention_oracle import Answer, truth

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.run.dispatch import BACKENDS

# The backends that the tests of attention run: all in dispatch's table that compute gradients on a CPU.
ON_CPU = tuple(name for name in BACKENDS if name not in ("fused", "flex"))
WITH_KEY_BIAS = tuple(name for name in ON_CPU if name != "banded")  # and with gates, dropout and tables of distances

EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def arguments(case: Case, dtype: torch.dtype, *, requires_grad: bool = False, device: str = "cpu") -> tuple[list, dict]:
    """(query, key, value, slopes) and the keywords of alibi_attention."""
    drawn = case.draw()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    args = [torch.tensor(drawn[name], dtype=dtype, device=device) for name in ("query", "key", "value")]
    args.append(torch.tensor(drawn["slopes"], dtype=wide, device=device))
    kwargs = {"causal": case.causal, "window": case.window, "scale": case.scale}
    if case.right:
        kwargs["right_slopes"] = torch.tensor(drawn["right_slopes"], dtype=wide, device=device)
    if case.offset is not None:
        array = drawn["query_offset"]
        kwargs["query_offset"] = case.offset if array is None else torch.tensor(array, device=device)
    if case.mask:
        kwargs["key_mask"] = torch.tensor(drawn["key_mask"], device=device)
    if case.segments:
        of_key = torch.tensor(drawn["key_segments"], device=device)
        pair = case.segments == "pair"
        kwargs["segment_ids"] = (torch.tensor(drawn["query_segments"], device=device), of_key) if pair else of_key
    if case.key_bias:
        kwargs["key_bias"] = torch.tensor(drawn["key_bias"], dtype=wide, device=device)
    if requires_grad:
        for tensor in [*args, *(kwargs[name] for name in ("right_slopes", "key_bias") if name in kwargs)]:
            tensor.requires_grad_()
    return args, kwargs


def answer(case: Case, dtype: torch.dtype, attention=alibi_attention, *, device: str = "cpu", **extra) -> Answer:
    """Output, lse and all gradients of one call."""
    args, kwargs = arguments(case, dtype, requires_grad=True, device=device)
    output, lse = attention(*args, **kwargs, return_lse=True, **extra)
    drawn = case.draw()
    grad_output = torch.tensor(drawn["grad_output"], dtype=dtype, device=device)
    grad_lse = torch.tensor(drawn["grad_lse"], dtype=lse.dtype, device=device).masked_fill(lse.isinf(), 0.0)
    leaf = dict(zip(("query", "key", "value", "slopes"), args, strict=True))
    leaf |= {name: kwargs[name] for name in ("right_slopes", "key_bias") if name in kwargs}
    found = torch.autograd.grad([output, lse], list(leaf.values()), [grad_output, grad_lse], allow_unused=True)
    gradients = {n: torch.zeros_like(leaf[n]) if g is None else g for n, g in zip(leaf, found, strict=True)}
    return Answer(output.detach().cpu(), lse.detach().cpu(), {n: g.cpu() for n, g in gradients.items()})


def without_gradients(case: Case, dtype: torch.dtype, *, device: str = "cpu", backend: str) -> Answer:
    """Output and lse of a call without gradients, with the true gradients beside them."""
    args, kwargs = arguments(case, dtype, device=device)
    with torch.no_grad():
        output, lse = alibi_attention(*args, **kwargs, return_lse=True, backend=backend)
    return Answer(output.cpu(), lse.cpu(), truth(case).gradients)


def plain_attention(
    query,
    key,
    value,
    slopes,
    *,
    causal,
    window,
    scale,
    right_slopes=None,
    query_offset=None,
    key_mask=None,
    segment_ids=None,
    key_bias=None,
    return_lse=True,
    kept=None,
):
    """Handwritten PyTorch attention in the input's dtype: the reference for rounding errors, not for correctness.

    With dropout, `kept` [B, H, T, S] holds the factors of the weights.
    """
    b, h, t, d = query.shape
    s, group = key.shape[2], h // key.shape[1]
    first = s - t if query_offset is None else query_offset
    device = query.device
    i = torch.as_tensor(first, device=device).reshape(-1, 1) + torch.arange(t, device=device)
    distance = (i[:, :, None] - torch.arange(s, device=device))[:, None]
    hide = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if causal:
        hide = hide | (distance < 0)
    if window is not None:
        hide = hide | (distance.abs() >= window)
    if key_mask is not None:
        hide = hide | ~key_mask[:, None, None]
        key, value = key.masked_fill(~key_mask[:, None, :, None], 0), value.masked_fill(~key_mask[:, None, :, None], 0)
    if segment_ids is not None:
        of_query, of_key = segment_ids if isinstance(segment_ids, tuple) else (None, segment_ids)
        of_query = of_key.gather(1, i.expand(b, t)) if of_query is None else of_query
        hide = hide | (of_query[:, None, :, None] != of_key[:, None, None])
    m = slopes.reshape(-1, h, 1, 1)
    if right_slopes is not None:
        right = right_slopes.reshape(-1, h, 1, 1)
        hide = hide | (right.isinf() & (distance < 0))
        m = torch.where(distance < 0, right.masked_fill(right.isinf(), 0.0), m)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = d**-0.5 if scale is None else scale
    scores = query @ key.mT * scale - m * distance.abs()
    if key_bias is not None:
        bias = key_bias if key_bias.ndim == 4 else key_bias.expand(b, h, s)[:, :, None]
        hide, scores = hide | (bias == -math.inf), scores + bias
    scores = scores.masked_fill(hide, -math.inf)
    blind = hide.all(-1, keepdim=True).expand(b, h, t, 1)
    scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1) if kept is None else scores.softmax(-1) * kept
    output = (weights.to(value.dtype) @ value).masked_fill(blind, 0.0)
    return output, scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)


@functools.cache
def plain(case: Case, dtype: torch.dtype, device: str = "cpu") -> Answer:
    """Eager PyTorch, written by hand."""
    return answer(case, dtype, plain_attention, device=device)


@functools.cache
def fused_error(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """The largest errors of torch's scaled_dot_product_attention, a fused kernel, with the bias as its mask.

    Its exponential is accurate to 20 bits, and its backward recomputes exp(score − lse).
    """
    drawn = case.draw()
    grad_output = torch.tensor(drawn["grad_output"], device=device)
    found: list[list] = []
    for work, backend in ((dtype, "dense"), (torch.float64, "reference")):
        args, kwargs = arguments(case, work, device=device)
        leaf = [x.requires_grad_() for x in args[:3]]
        output = alibi_attention(*leaf, args[3], **kwargs, backend=backend)
        gradients = torch.autograd.grad(output, leaf, grad_output.to(work), allow_unused=True)
        found.append([x if x is None else x.double().nan_to_num(0.0) for x in (output, *gradients)])
    names = ("output", "query", "key", "value")
    pairs = zip(names, *found, strict=True)
    return {name: 0.0 if x is None else (x - y).abs().max().item() for name, x, y in pairs}


def assert_exact(case: Case, dtype: torch.dtype, got: Answer, *, tolerance: float = 0.0, device: str = "cpu") -> float:
    """Asserts that errors are at most twice plain PyTorch's in the same dtype, plus the bounds of docs/design.md.

    Plain PyTorch is the less accurate of handwritten eager attention and, if it has the result, torch's fused function,
    on the same device. Returns the largest error as a share of the allowed error.
    """
    true, by_hand = truth(case), plain(case, dtype, device)
    drawn = case.draw()
    finite = {n: torch.nan_to_num(torch.tensor(drawn[n]), 0, 0, 0) for n in ("query", "key", "value", "grad_output")}
    size = {n: float(x.norm(dim=-1).max()) for n, x in finite.items()}
    scale = abs(case.scale if case.scale is not None else case.head_dim**-0.5)
    # Section 5: what skipping may drop from each result, for all queries of a key together.
    lost = tolerance * max(case.query_len, 1) * (case.heads // (case.kv_heads or case.heads))
    spread = size["grad_output"] * size["value"] * 2 + float(torch.tensor(drawn["grad_lse"]).abs().max())
    bounds = {
        "output": 2 * tolerance * size["value"],
        "lse": 2 * tolerance,
        "query": 2 * tolerance * spread * scale * size["key"],
        "key": lost * spread * scale * size["query"],
        "value": lost * size["grad_output"],
        "slopes": lost * spread * case.batch * (case.key_len + 300),
        "right_slopes": lost * spread * case.batch * (case.key_len + 300),
        "key_bias": lost * spread * case.batch * case.heads,
    }
    # torch's fused function returns no lse: recomputing exp(score − lse) in backward costs half a unit of |lse|.
    rows = true.lse.masked_fill(true.lse.isinf(), 0.0).abs() * torch.tensor(drawn["grad_lse"]).abs()
    bounds["query"] += EPS[torch.promote_types(dtype, torch.float32)] / 2 * rows.max().item() * scale * size["key"]
    pairs = {"output": (got.output, true.output, by_hand.output), "lse": (got.lse, true.lse, by_hand.lse)}
    pairs |= {n: (got.gradients[n], true.gradients[n], by_hand.gradients[n]) for n in true.gradients}
    worst = 0.0
    for name, (ours, exact, theirs) in pairs.items():
        ours, theirs = ours.double(), theirs.double()
        assert ours.shape == exact.shape, f"{name}: shape {list(ours.shape)}"
        blind = exact == -math.inf
        assert bool((ours[blind] == -math.inf).all()), f"{name}: a query that sees nothing must have lse −inf"
        assert bool(ours[~blind].isfinite().all()), f"{name} is not finite"
        error = (ours - exact).masked_fill(blind, 0.0).abs().max().item()
        yardstick = (theirs - exact).masked_fill(blind, 0.0).abs().max().item()
        yardstick = max(yardstick, fused_error(case, dtype, device).get(name, 0.0))
        magnitude = exact.masked_fill(blind, 0.0).abs().max().item()
        floor = 2 * EPS[dtype] * magnitude if name == "output" or dtype == torch.float64 else 4 * EPS[dtype] * magnitude
        if name == "lse":
            floor = 4 * EPS[torch.promote_types(dtype, torch.float32)] * max(magnitude, 1.0)
        allowed = 2 * yardstick + bounds[name] + floor
        assert error <= allowed, (
            f"{name}: error {error:.3e} but {allowed:.3e} is allowed (plain PyTorch: {yardstick:.3e})"
        )
        worst = max(worst, error / allowed) if error > 0 else worst
    return worst


def assert_one_far_key(case: Case, got: Answer) -> None:
    """Asserts the slopes' gradient for one key, −Σ dlse·|i − j|: only lse depends on the slope."""
    far = (case.offset + torch.arange(case.query_len, dtype=torch.float64)).abs()
    terms = torch.tensor(case.draw()["grad_lse"]) * far
    name = "right_slopes" if case.right else "slopes"
    # fp32: rounding of the terms, and of ds (mathematically 0) times a block's distances relative to its offset.
    allowed = 2.0**-22 * (terms.abs().sum((0, 2)) + far.max())
    assert bool(((got.gradients[name].double() + terms.sum((0, 2))).abs() <= allowed).all())
    if case.right:
        assert torch.equal(got.gradients["slopes"], torch.zeros_like(got.gradients["slopes"]))
