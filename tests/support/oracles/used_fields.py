"""For each field of a call's description a call in which it changes the result: what declares a field must compute it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend
from alibi_attn.flash_attn import call_of

B, H, K, T, S, D = 2, 4, 2, 70, 90, 16
SLOPES = [0.5, 0.05, 0.01, 0.0]
Function = Callable[..., tuple[Tensor, Tensor | None]]


class Drawn(NamedTuple):
    """The options of a call, and those of the same call without the field."""

    options: dict[str, Any]
    without: dict[str, Any] = {}  # noqa: RUF012
    function: str = "alibi_attention"


def _row(length: int, seed: int) -> Tensor:
    return torch.rand(B, length, generator=torch.Generator().manual_seed(seed))


def _segments(length: int) -> Tensor:
    return (torch.arange(S - length, S) * torch.tensor([[3], [5]])) // 100


_POSITIONS = {"positions": 3 * _row(S, 0).cumsum(1)}
_GATES = {"log_fgate": torch.log(_row(H * S, 2).view(B, H, S)) / 9}
_CUTS = {"log_fgate": _GATES["log_fgate"].masked_fill(torch.arange(S) == S - T // 2, -torch.inf)}
_SYMMETRIC = {"causal": False}
PLANE = _SYMMETRIC | {"positions": torch.stack([9 * _row(S, 8), 9 * _row(S, 9)], -1)}
_DROPOUT = Drawn({"dropout_p": 0.4})
_NUMBERED = Drawn({"numbered": True}, {"numbered": False}, "with dropout")
FIELDS = {
    "causal": Drawn(_SYMMETRIC),
    "right_slopes": Drawn(_SYMMETRIC | {"right_slopes": [0.0, 0.2, torch.inf, 0.1]}, _SYMMETRIC),
    "window": Drawn({"window": 20}),
    "head_windows": Drawn({"window": [20, 30, 20, 9]}, {"window": 20}),
    "sinks": Drawn({"window": 20, "sinks": 3}, {"window": 20}),
    "prefix_len": Drawn({"prefix_len": torch.tensor([50, 30])}),
    "positions": Drawn(_POSITIONS),
    # One shift per query changes nothing but its lse.
    "query_positions": Drawn(
        _POSITIONS | {"query_positions": _POSITIONS["positions"][:, S - T :] + 1, "return_lse": True},
        _POSITIONS | {"return_lse": True},
    ),
    "by_position": Drawn(
        _SYMMETRIC | _POSITIONS | {"query_positions": 4 * _row(T, 1).cumsum(1)}, _SYMMETRIC | _POSITIONS
    ),
    "coordinates": Drawn(PLANE, _SYMMETRIC),
    "query_coordinates": Drawn(PLANE | {"query_positions": torch.stack([9 * _row(T, 10), 9 * _row(T, 11)], -1)}, PLANE),
    "registers": Drawn(_SYMMETRIC | {"registers": 40}, _SYMMETRIC),
    "right_window": Drawn({"window_size": (20, 5)}, {"window_size": (20, 20)}, "flash_attn_func"),
    "query_offset": Drawn({"query_offset": torch.tensor([3, 11])}),
    "key_mask": Drawn({"key_mask": _row(S, 3) < 0.8}),
    "query_segments": Drawn({"segment_ids": (_segments(T), _segments(S))}),
    "key_segments": Drawn({"segment_ids": (_segments(T), _segments(S))}),
    "key_bias": Drawn({"key_bias": 3 * _row(H * S, 4).view(B, H, S)}),
    "query_bias": Drawn(_GATES, {"log_fgate": torch.zeros(B, H, S)}, "forgetting_attention"),
    "query_start": Drawn(_CUTS, _GATES, "forgetting_attention"),
    "table": Drawn(
        {"table": torch.sin(torch.arange(float(S))).expand(H, S)}, {"table": torch.zeros(H, S)}, "toeplitz_attention"
    ),
    "sink_logits": Drawn({"sink_logits": torch.tensor([2.0, 0.0, 3.0, 1.0])}),
    "dropout_p": _DROPOUT,
    "dropout_seed": _DROPOUT,
    "query_numbers": _NUMBERED,
    "key_numbers": _NUMBERED,
    "return_lse": Drawn({"return_lse": True}),
}


def rows(length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of the calls; the keys are the last `length` ones."""
    generator = torch.Generator().manual_seed(7)
    of_query = torch.randn(B, H, T, D, generator=generator)
    of_key, of_value = torch.randn(2, B, K, S, D, generator=generator)
    return of_query, of_key[:, :, S - length :], of_value[:, :, S - length :]


def result(function: str, options: dict[str, Any], backend: str) -> tuple[Tensor, Tensor | None]:
    """(output, lse) of a call with the same dropout in all backends; None for lse unless it is among the options."""
    torch.manual_seed(5)
    given: Any
    if function == "forgetting_attention":
        given = forgetting_attention(*rows(), slopes=SLOPES, backend=backend, **options)
    elif function == "flash_attn_func":  # whose functions have no argument `backend`
        slopes = torch.tensor(SLOPES)
        spec = call_of(*rows(), slopes, False, options["window_size"], None, 0.0, 0.0)
        given = attend(dataclasses.replace(spec, return_lse=False), *rows(), backend)
    elif function == "with dropout":  # of keys that are in another order than they were
        spec = make_spec(*rows(), SLOPES, dropout_p=0.4)
        at = torch.arange(S).flip(0).expand(B, -1)
        more = {"query_numbers": at[:, :T] + 7, "key_numbers": at} if options["numbered"] else {}
        given = attend(dataclasses.replace(spec, dropout_seed=torch.tensor([[5, 0, 0, 0]]), **more), *rows(), backend)
    elif function == "toeplitz_attention":
        given = toeplitz_attention(*rows(), backend=backend, **options)
    else:
        given = alibi_attention(*rows(), SLOPES, backend=backend, **options)
    return given if isinstance(given, tuple) else (given, None)


def assert_computes(field: str, backend: str) -> None:
    """The backend's result is that of the definition, and not that of the call without the field."""
    drawn = FIELDS[field]
    output, lse = result(drawn.function, drawn.options, backend)
    expected, expected_lse = result(drawn.function, drawn.options, "reference")
    without, no_lse = result(drawn.function, drawn.without, "reference")
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    if expected_lse is not None:
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    changed = [expected - without] if expected_lse is None or no_lse is None else [expected_lse - no_lse]
    assert field == "return_lse" or float(changed[0].abs().max()) > 0.01, f"{field} changes nothing in its call"
    assert (expected_lse is None) == (not drawn.options.get("return_lse"))
