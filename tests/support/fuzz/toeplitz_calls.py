"""Random calls with a table of distances, and their truth: plain attention in fp64."""

import dataclasses
import functools
import math
import random
from typing import Any

import torch
from attention_checks import plain_attention
from torch import Tensor

from alibi_attn.attention.toeplitz import toeplitz_attention

INPUTS = ("query", "key", "value", "table")
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, with the incoming gradients of its output and lse.

    Args:
        inputs: query, key, value and table.
        options: keywords of `toeplitz_attention`; `segment_ids` as a pair.
        grads: the gradients of output and lse.
        threads: number of threads.
    """

    inputs: dict[str, Tensor]
    options: dict[str, Any]
    grads: tuple[Tensor, Tensor]
    threads: int

    @functools.cached_property
    def truth(self) -> dict[str, Tensor]:
        return _truth(self)


@functools.cache
def draw(seed: int) -> Call:
    rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    b, k, group = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 1, 2, 3])
    t, s = (rng.choice([1, 2, 17, 63, 64, 65, 90, 128, 150]) for _ in range(2))
    s = t if rng.random() < 0.4 else s
    d, causal = rng.choice([1, 8, 16, 20, 64]), rng.random() < 0.6
    dtype = rng.choice(DTYPES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    options: dict[str, Any] = {"causal": causal}
    offset = s - t
    if rng.random() < 0.3:
        offset = options["query_offset"] = rng.choice([offset, 0, 5, s, s + 40, -30, -t - 2])
    if rng.random() < 0.3:
        options["window"] = rng.choice([1, 7, 64, 100, 1000])
    if rng.random() < 0.2:
        options["scale"] = rng.choice([0.0, -0.3, 1.0, 3.0])
    if rng.random() < 0.3:
        options["key_mask"] = torch.rand(b, s, generator=numbers) < 0.7
    if rng.random() < 0.3:
        ids = [torch.randint(0, 3, (b, n), generator=numbers) for n in (t, s)]
        options["segment_ids"] = tuple(x.sort(-1)[0] for x in ids) if rng.random() < 0.7 else tuple(ids)
    farthest = max(offset + t, 1) if causal else max(offset + t, s - offset, 1)
    n = min(farthest, options.get("window", farthest)) + rng.choice([0, 0, 1, 50])
    table = normal(k * group, n if causal else 2 * n - 1) * rng.choice([0.5, 3.0])
    shapes = {"query": (b, k * group, t, d), "key": (b, k, s, d), "value": (b, k, s, d)}
    inputs = {name: normal(*shape).to(dtype) for name, shape in shapes.items()}
    inputs["table"] = table.to(torch.float64 if dtype == torch.float64 else torch.float32)
    work = torch.promote_types(dtype, torch.float32)
    grads = normal(b, k * group, t, d).to(dtype), normal(b, k * group, t).to(work)
    return Call(inputs, options, grads, rng.choice([1, 2]))


@functools.cache
def long(causal: bool, *, tokens: int = 700) -> Call:
    """A call of two grouped heads of 64 numbers, over many tiles."""
    numbers = torch.Generator().manual_seed(0)
    shapes = (1, 2, tokens, 64), (1, 1, tokens, 64), (1, 1, tokens, 64), (2, tokens if causal else 2 * tokens - 1)
    given = (torch.randn(shape, generator=numbers) for shape in (*shapes, shapes[0], shapes[0][:3]))
    *inputs, output, lse = given
    return Call(dict(zip(INPUTS, inputs, strict=True)), {"causal": causal}, (output, lse), 1)


def seeded(seed: int | bool, dtype: str) -> Call:
    """`draw` of a seed, or a `long` call that is causal or not, in this dtype, with a table in fp32."""
    call, kind = long(seed) if isinstance(seed, bool) else draw(seed), getattr(torch, dtype)
    inputs = {name: x.to(torch.float32 if name == "table" else kind) for name, x in call.inputs.items()}
    output, lse = call.grads
    return dataclasses.replace(call, inputs=inputs, grads=(output.to(kind), lse.float()))


def answer(call: Call, backend: str, device: str = "cpu") -> dict[str, Tensor]:
    """Output, lse and gradients of the inputs, in fp64."""
    before = torch.get_num_threads()
    torch.set_num_threads(call.threads)
    try:
        leaves = {name: x.detach().to(device).requires_grad_() for name, x in call.inputs.items()}
        options = {name: _moved(x, device) for name, x in call.options.items()}
        output, lse = toeplitz_attention(**leaves, **options, return_lse=True, backend=backend)
        found = torch.autograd.grad((output, lse), list(leaves.values()), _moved(call.grads, device))
    finally:
        torch.set_num_threads(before)
    results = dict(zip(INPUTS, found, strict=True)) | {"output": output.detach(), "lse": lse.detach()}
    return {name: x.cpu().double() for name, x in results.items()}


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(_moved(part, device) for part in x)
    return x.to(device) if isinstance(x, Tensor) else x


def _truth(call: Call) -> dict[str, Tensor]:
    leaves = {name: x.detach().double().requires_grad_() for name, x in call.inputs.items()}
    *rows, table = leaves.values()
    (_, h, t, _), s, n = rows[0].shape, rows[1].shape[2], table.shape[1]
    options = {"window": None, "scale": None} | call.options
    away = options.get("query_offset", s - t) + torch.arange(t)[:, None] - torch.arange(s)
    columns = (away if options["causal"] else away + n // 2).clamp(0, n - 1)  # of hidden keys any
    of_pairs = table[:, columns][None]
    results = plain_attention(*rows, torch.zeros(h, dtype=torch.float64), key_bias=of_pairs, **options)
    found = torch.autograd.grad(results, list(leaves.values()), [x.double() for x in call.grads])
    return dict(zip((*INPUTS, "output", "lse"), (*found, *(x.detach() for x in results)), strict=True))


def check(call: Call, backend: str, device: str = "cpu") -> float:
    """Checks output, lse and gradients; half precision may have up to twice the error of `dense` on a CPU.

    Returns the largest error as a share of the allowed one.

    Raises:
        AssertionError: names the wrong number and its error.
    """
    dtype, exact, ours = call.inputs["query"].dtype, call.truth, answer(call, backend, device)
    low = dtype in (torch.float16, torch.bfloat16)
    theirs = answer(call, "dense") if low and backend != "dense" else exact
    eps, worst = torch.finfo(dtype).eps, 0.0
    for name, right in exact.items():
        blind = right == -math.inf
        assert bool((ours[name][blind] == -math.inf).all()), f"{name}: a query that sees nothing must have lse −inf"
        error, yardstick = (float((x[name] - right).masked_fill(blind, 0.0).abs().max()) for x in (ours, theirs))
        allowed = 2 * yardstick + (8 if low else 60) * eps * max(1.0, float(right.masked_fill(blind, 0.0).abs().max()))
        assert error <= allowed, f"{backend} {dtype} {name}: error {error:.2e} but {allowed:.2e} is allowed"
        worst = max(worst, error / allowed)
    return worst
