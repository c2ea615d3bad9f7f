"""Queries far from all keys, and far addresses, in the Triton kernels; runs in the process with Triton's interpreter."""

# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused.kernels.tiles import pair_rows
from alibi_attn.attention.backends.fused.launch import is_describable

NEAR, KEYS = 3, 130
SHIFTS = torch.tensor([2**29, 2**32, 2**40, -(2**32), -(2**40)])


def described_and_addressed_rows() -> list[tuple[float, float]]:
    """Errors of the gradients of queries, keys and values, relative to the largest entry: with rows that the device fetches by
    itself, and of the same numbers where it cannot, because they begin 2 bytes later.

    The first slope is too steep for `SHIFTED`; a part of the keys is hidden, and the last tiles are not whole.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(2, h, t, 40).half() for h, t in ((4, 150), (2, 170), (2, 170))]
    grad = torch.randn(2, 4, 150, 40).half()
    options = {"slopes": [20.0, 1.0, 0.1, 0.01], "key_mask": torch.rand(2, 170) < 0.9}

    def gradients(rows: list[Tensor], dtype: torch.dtype, backend: str) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in rows]
        return torch.autograd.grad(alibi_attention(*inputs, backend=backend, **options), inputs, grad.to(dtype))

    later = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in leaves]
    assert all(map(is_describable, leaves))
    assert not any(map(is_describable, later))
    true = gradients(leaves, torch.float64, "reference")
    ours = (gradients(rows, torch.float16, "fused") for rows in (leaves, later))
    return list(
        zip(
            *([float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, true, strict=True)] for got in ours),
            strict=True,
        )
    )


def errors_of_far_queries(queries: int, name: str) -> dict[str, float]:
    """The largest errors of output, lse and gradients, relative to the largest entry.

    The truth is the definition in fp64 a few tokens from the keys; farther queries have the same results, and a smaller lse.

    Args:
        name: "causal", "both sides", "window" (some keys are within it), "dropout" or "key bias".
    """
    torch.manual_seed(0)
    b = len(SHIFTS)
    query, key, value = torch.randn(b, 2, queries, 16), *torch.randn(2, b, 2, KEYS, 16)
    leaves = [query, key, value, torch.tensor([0.3, 0.01])]
    shifts, near = SHIFTS, torch.where(SHIFTS > 0, KEYS + NEAR, -queries - NEAR)
    options: dict[str, Any] = {"causal": name in ("causal", "dropout")}
    if name == "both sides":
        options["right_slopes"] = torch.tensor([0.2, torch.inf])
    elif name == "window":
        shifts, near, options["window"] = shifts[2:3].expand(b), near[:1].expand(b), 60
    elif name == "dropout":  # positions that differ by 2³² draw the same number
        shifts, options["dropout_p"] = shifts * 8, 0.3
    elif name == "key bias":
        options["key_bias"] = torch.randn(b, 2, KEYS, dtype=torch.float64)
    far = options | ({"window": 60 + int(shifts[0])} if name == "window" else {})
    found = _answer("fused", leaves, shifts * 0, far | {"query_offset": near + shifts})
    options |= {x: y.double() for x, y in options.items() if x in ("right_slopes", "key_bias")}
    true = _answer("reference", [x.double() for x in leaves], shifts, options | {"query_offset": near})
    errors = {}
    for of, ours, exact in zip(("output", "lse", "query", "key", "value", "slopes"), found, true, strict=True):
        assert torch.equal(ours.isinf(), exact.isinf()), of
        exact = exact.nan_to_num(neginf=0.0)
        error = (ours.double().nan_to_num(neginf=0.0) - exact).abs().max()
        errors[of] = float(error / exact.abs().max())
    return errors


def offsets_of_pairs(heads: int, rows: int) -> list[int]:
    """How many bytes after its lse the pairs of a head are."""
    lse, out = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    _kernel[(1,)](lse, out, heads, rows)
    return out.tolist()


@triton.jit
def _kernel(LSE, OUT, H, T):
    high, low = pair_rows(LSE, H, T)
    tl.store(OUT, high.to(tl.int64) - LSE.to(tl.int64))
    tl.store(OUT + 1, low.to(tl.int64) - LSE.to(tl.int64))


def _answer(backend: str, leaves: list[Tensor], shifts: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Output, lse and gradients, with the bias of `shifts` in lse."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    torch.manual_seed(3)  # of dropout
    output, lse = alibi_attention(*leaves, **options, return_lse=True, backend=backend)
    slopes = leaves[3].expand(len(shifts), -1)
    if "right_slopes" in options:
        slopes = torch.where(shifts[:, None] < 0, options["right_slopes"].nan_to_num(posinf=0.0), slopes)
    lse = lse - (slopes * shifts.abs()[:, None])[..., None]
    weights = torch.randn(output.shape), torch.randn(lse.shape).masked_fill(lse.isinf(), 0.0)
    weights = [w.to(x.dtype) for w, x in zip(weights, (output, lse), strict=True)]
    return [output.detach(), lse.detach(), *torch.autograd.grad([output, lse], leaves, weights)]
