"""Linear layers of one GPU in int8 and float8, compared with the formula of `nn/quantized.py` in fp64, and timed next to bf16."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from alibi_attn.nn.quantized import Kind, QuantizedLinear, check_supported
from alibi_lab.measure.gpu_parts import COLUMNS, Calls, Case, Part, call_row, cases, number_type
from alibi_lab.measure.gpu_truth import judged, relative_error
from alibi_lab.measure.harness import Row

ROWS = 256  # that are compared
LARGEST: dict[Kind, float] = {"int8": 127.0, "float8": 448.0}
COMPILED = ", compiled"


def linears(case: Case, device: torch.device, *, compiled: bool = False) -> Calls:
    """A layer of `case.heads` · `case.head_dim` inputs and four times as many outputs, for `case.length` tokens."""
    width = case.heads * case.head_dim
    torch.manual_seed(0)
    with device:
        layer = nn.Linear(width, 4 * width).to(number_type(device)).requires_grad_(False)
        x = torch.randn(case.length, width).to(number_type(device))
    some = x[:ROWS]
    exact = nn.functional.linear(some.double(), layer.weight.double(), layer.bias.double())

    def row(kind: Kind | None) -> Row:
        run: Any = layer if kind is None else QuantizedLinear(layer, kind)
        true = exact if kind is None else formula(layer, some, kind)
        if compiled:
            run = torch.compile(run, fullgraph=True, backend="inductor" if device.type == "cuda" else "eager")
        found = run(x)[:ROWS].double()
        # Four roundings, and the sums. On a GPU float8 adds 32 products at once to sums of 14 bits.
        sums = {None: width * 2**-24, "int8": 0.0, "float8": width / 32 * 2**-14}[kind]
        allowed = 2 * torch.finfo(torch.bfloat16 if kind == "float8" else x.dtype).eps + sums
        errors = judged(relative_error(found, true), allowed)
        errors["rounding_error"] = float((found - exact).norm() / exact.norm())
        errors["equal_on_cpu"] = None if compiled or kind != "int8" else on_cpu(run, some, found)
        return call_row(errors, lambda: run(x), device)

    end = COMPILED if compiled else ""
    quick: Calls = {kind + end: functools.partial(row, kind) for kind in LARGEST}
    return quick if compiled else {"unquantized": functools.partial(row, None), **quick}


def on_cpu(small: QuantizedLinear, x: Tensor, found: Tensor) -> float | None:
    """The share of outputs with the bits that the layer gives on the CPU; None if it cannot run there."""
    try:
        check_supported("int8", "cpu")
    except ValueError:
        return None
    moved = copy.deepcopy(small).to("cpu")
    return float((moved(x.cpu()) == found.cpu()).double().mean())


def formula(layer: nn.Linear, x: Tensor, kind: Kind) -> Tensor:
    """The output in fp64, from codes in fp32."""

    def coded(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.cpu().float()
        scales = rows.abs().amax(1, keepdim=True) / LARGEST[kind]
        codes = (rows / scales).round() if kind == "int8" else (rows / scales).to(torch.float8_e4m3fn)
        return codes.to(x.device).double(), scales.to(x.device).double()

    (tokens, of_tokens), (weights, of_weights) = coded(x), coded(layer.weight)
    return (tokens @ weights.T) * of_tokens * of_weights.T + layer.bias.double()


PEERS = {"int8": "torch._int_mm, eager", "float8": "torch._scaled_mm, eager"}
COMPILED_PEERS = {name + COMPILED: f"{what.removesuffix('eager')}torch.compile" for name, what in PEERS.items()}
MEASURED, OURS = (*COLUMNS, "rounding_error", "equal_on_cpu"), tuple(LARGEST)
CASES = cases("1x16384x12x64 1x16384x16x128 1x1x16x128", "1x30x2x16")
LINEARS = Part("linears", 3.0, {"unquantized": "nn.Linear", **PEERS}, CASES, linears, MEASURED, OURS)
COMPILED_CASES = cases("1x16384x16x128", "1x30x2x16")
compiled_linears = functools.partial(linears, compiled=True)
LINEARS_COMPILED = Part("linears-compiled", 6.0, COMPILED_PEERS, COMPILED_CASES, compiled_linears, MEASURED, OURS)
