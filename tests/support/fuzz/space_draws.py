"""Draws calls in the plane and in space, and compares outputs and all gradients with the definition in fp64.

    python tests/support/fuzz/space_draws.py --draws 2000

fp64 must agree to 1e-11; in fp32 and bf16 the error may be twice that of `dense` on the same call, plus a few roundings of the
largest number; for slopes one rounding of the terms that are added, for lse the tolerance. Prints each draw that fails.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
from space_oracle import KINDS, definition, points, weights_of

from alibi_attn import alibi_attention
from alibi_attn.attention.run import space

BACKENDS = ("native", "native", "native", "native", "dense", "reference", "by rows")
DTYPES = {torch.float64: 1e-11, torch.float32: None, torch.bfloat16: None}
NAMES = ("output", "lse", "dq", "dk", "dv", "dslopes")
ROUNDINGS = 8.0


class Drawn(NamedTuple):
    """One call."""

    rows: list[Tensor]  # query, key, value, slopes
    places: tuple[Tensor, Tensor]  # of queries and keys
    options: dict[str, Any]  # of `alibi_attention`
    truth: dict[str, Any]  # of the definition
    backend: str
    words: str


def draw(seed: int) -> Drawn:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype, backend, kind = choose.choice(list(DTYPES)), choose.choice(BACKENDS), choose.choice(KINDS)
    batch, heads = choose.choice([0, 1, 1, 2, 3]), choose.choice([1, 2, 6])
    key_heads, size = choose.choice([x for x in (1, 2, heads) if heads % x == 0]), choose.choice([1, 8, 20, 64])
    is_self, axes = choose.random() < 0.6, choose.choice([2, 3])
    key_len = choose.choice([1, 2, 33, 64, 65, 130, 300])
    query_len = key_len if is_self else choose.choice([1, 3, 64, 90, 200])
    side = choose.choice([1.0, 50.0, 5000.0])
    rows = [torch.randn(batch, query_len, heads, size), *torch.randn(2, batch, key_len, key_heads, size)]
    is_view = choose.random() < 0.5
    rows = [x.to(dtype).transpose(1, 2) if is_view else x.to(dtype).transpose(1, 2).contiguous() for x in rows]
    work, shape = torch.promote_types(dtype, torch.float32), choose.choice([(heads,), (batch, heads)])
    slopes = torch.rand(shape, dtype=work) * choose.choice([0.02, 1.0, 30.0]) / min(side, 50.0)
    if choose.random() < 0.15:
        slopes[..., 0] = choose.choice([0.0, -0.01])
    of_places = choose.choice([torch.float32, torch.float64])
    of_key = points(kind, batch, key_len, axes, side).to(of_places)
    of_query = of_key if is_self else points(kind, batch, query_len, axes, side).to(of_places)
    registers = choose.choice([0, 0, 0, 1, 5, key_len]) if query_len <= key_len else 0
    mask = torch.rand(batch, key_len) < choose.choice([0.05, 0.8]) if choose.random() < 0.4 else None
    segments = None
    if choose.random() < 0.4:
        segments = torch.randint(0, 4, (batch, query_len)), torch.randint(0, 4, (batch, key_len))
        segments = (segments[1], segments[1]) if is_self else segments
    bias = torch.randn(batch, heads, key_len, dtype=work) if backend != "native" and choose.random() < 0.3 else None
    options = {"causal": False, "positions": of_key, "registers": registers, "key_mask": mask, "key_bias": bias}
    options |= {"segment_ids": segments, "query_positions": None if is_self else of_query, "return_lse": True}
    truth = {"registers": registers, "key_mask": mask, "segments": segments}
    truth["key_bias"] = None if bias is None else bias.double()
    words = f"seed {seed}: {backend} {dtype} {kind} B={batch} H={heads}/{key_heads} T={query_len} S={key_len} D={size} C={axes}"
    return Drawn([*rows, slopes], (of_query.double(), of_key.double()), options, truth, backend, words)


def differentiated(function: Any, rows: list[Tensor], dtype: torch.dtype, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """`NAMES`, in fp64; grads of lse count where a key is seen."""
    inputs = [
        x.detach().to(dtype if at < 3 else torch.promote_types(dtype, torch.float32)) for at, x in enumerate(rows)
    ]
    inputs = [x.requires_grad_() for x in inputs]
    output, lse = function(*inputs)
    sees = lse.isfinite()
    total = (output * grads[0].to(output.dtype)).sum() + (lse[sees] * grads[1].to(lse.dtype)[sees]).sum()
    return [x.detach().double() for x in (output, lse, *torch.autograd.grad(total, inputs))]


def errors(drawn: Drawn) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(errors, those of `dense`, the largest numbers), by name."""
    rows, options = drawn.rows, drawn.options
    dtype = rows[0].dtype
    grads = torch.randn(rows[0].shape, dtype=torch.float64).to(dtype), torch.randn(rows[0].shape[:3])
    name = "auto" if drawn.backend == "by rows" else drawn.backend
    found = differentiated(lambda *x: alibi_attention(*x, backend=name, **options), rows, dtype, grads)
    plain = found
    if dtype != torch.float64:
        plain = differentiated(lambda *x: alibi_attention(*x, backend="dense", **options), rows, dtype, grads)
    true = differentiated(lambda *x: definition(*x, *drawn.places, **drawn.truth), rows, torch.float64, grads)
    if not torch.equal(found[1].isfinite(), true[1].isfinite()):
        raise AssertionError("lse is −inf where a key is seen, or the reverse")
    largest = max((float(x.abs().max()) for x in true[2:] if x.numel()), default=0.0)
    results: tuple[dict[str, float], ...] = ({}, {}, {})
    for at, of_name in enumerate(NAMES):
        real = true[at].isfinite()
        for result, x in zip(results, (found[at] - true[at], plain[at] - true[at], true[at]), strict=True):
            result[of_name] = float(x[real].abs().max()) if bool(real.any()) else 0.0
        # A gradient that is 0 on paper is a rounding of the others; a slope's is a sum over distances.
        results[2][of_name] = max(results[2][of_name], largest if at >= 2 else 1.0)
    return results[0], results[1], results[2]


def assert_near(drawn: Drawn) -> None:
    """Every error is at most what is allowed."""
    dtype = drawn.rows[0].dtype
    found, plain, largest = errors(drawn)
    for name in NAMES:
        limit = 1e-11 * largest[name] if dtype == torch.float64 else 2 * plain[name]
        if dtype != torch.float64:
            eps = torch.finfo(torch.float32 if name == "lse" else dtype).eps
            limit += ROUNDINGS * eps * largest[name]
            limit += eps * _terms_of_slopes(drawn) if name == "dslopes" else 0.0
            limit += torch.finfo(dtype).eps / 32 if name == "lse" else 0.0  # the tolerance: a share that may be skipped
        allowed = f"dense by {plain[name]:.2e}; allowed {limit:.2e}"
        assert found[name] <= limit, f"{name} is off by {found[name]:.2e}, {allowed}"


def _terms_of_slopes(drawn: Drawn) -> float:
    """The largest Σ p·(‖do‖·(‖v‖ + ‖o‖) + |dlse|)·d: dslope is a sum of ds·d, with ds = p·(do·v − do·o + dlse)."""
    q, k, v, slopes = (x.double() for x in drawn.rows)
    weights, _, distance = weights_of(q, k, slopes, *drawn.places, **drawn.truth)
    lengths = v.norm(dim=-1).repeat_interleave(q.shape[1] // v.shape[1], 1)
    of_grad = q.shape[-1] ** 0.5  # ‖do‖, about; |dlse| is about 1
    terms = weights * (of_grad * (lengths[:, :, None] + lengths.amax(-1)[..., None, None]) + 1.0) * distance[:, None]
    return float(terms.sum((-1, -2)).sum(0).max()) if terms.numel() else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    failures, most = 0, space.MOST_SCORES
    for seed in range(given.first, given.first + given.draws):
        drawn = draw(seed)
        space.MOST_SCORES = 3000 if drawn.backend == "by rows" else most
        try:
            assert_near(drawn)
        except Exception as error:
            failures += 1
            print(f"{drawn.words}\n    {type(error).__name__}: {error}", flush=True)
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1 - given.first} draws, {failures} failures", flush=True)
    print(f"{given.draws} draws, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main())
