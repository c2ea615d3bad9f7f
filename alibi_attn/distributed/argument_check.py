"""Checks that all ranks were called with the same arguments; on a mismatch every rank raises the same error.

Every rank takes part, even if its own arguments are invalid: otherwise the others would wait for it.
"""

import math
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from alibi_attn.attention.bias import Slopes
from alibi_attn.attention.spec import EPS, AttentionSpec, dtype_name
from alibi_attn.attention.validation import make_spec
from alibi_attn.distributed.exchange import Ranks

Spec = AttentionSpec[Tensor]

REFUSED, READY = 0, 1


class GatedShardOptions(TypedDict, total=False):
    """The keyword arguments of a gated call that `make_spec` checks; as for `forgetting_attention`."""

    window: int | None
    scale: float | None
    key_mask: Tensor | None
    segment_ids: Tensor | None
    key_bias: Tensor | None
    dropout_p: float
    tolerance: float | None
    return_lse: bool


class ShardOptions(GatedShardOptions, total=False):
    """The keyword arguments of a call without gates; as for `alibi_attention`."""

    causal: bool
    right_slopes: Slopes | None


def shard_spec(
    query: Tensor, key: Tensor, value: Tensor, slopes: Slopes | None, **options: Unpack[ShardOptions]
) -> Spec:
    """Validates the self-attention call of one shard, or of a whole sequence before it is split.

    Raises:
        ValueError, TypeError: as for `alibi_attention`; a pair of segment ids; a query offset; different numbers of queries and
            keys.
    """
    if isinstance(options.get("segment_ids"), tuple | list):
        raise TypeError(
            "segment_ids is a pair but a shard's queries and keys are the same rows: pass one tensor [B, L] for the shard"
        )
    spec = make_spec(query, key, value, slopes, query_offset=None, **options)
    if spec.query_len != spec.key_len:
        raise ValueError(
            f"query has {spec.query_len} rows and key {spec.key_len} but context parallelism is self-attention: pass the same "
            "rows of the sequence as query, key and value"
        )
    return spec


_DTYPES = (*EPS,)
_NONE = -1  # an argument that was not passed; all numbers below are ≥ 0


class _Arguments(NamedTuple):
    """The arguments of one rank's call."""

    spec: Spec
    key: Tensor
    value: Tensor
    log_fgate: Tensor | None
    score_bound: float | None


def _bits(number: float | None) -> int:
    """The lower 63 bits of an fp64 number; its sign is exchanged separately."""
    return _NONE if number is None else int(struct.unpack("<q", struct.pack("<d", abs(number)))[0])


def _checksum(slopes: Tensor | None) -> int:
    return _NONE if slopes is None else zlib.crc32(slopes.detach().double().cpu().contiguous().numpy().tobytes())


def _dtype_of(tensor: Tensor | None) -> int:
    return _NONE if tensor is None else _DTYPES.index(dtype_name(tensor.dtype))


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _or_none(text: Callable[[int], str]) -> Callable[[int], str]:
    return lambda value: "None" if value == _NONE else text(value)


def _truth(value: int) -> str:
    return str(bool(value))


_plain = _or_none(str)
_number = _or_none(lambda value: repr(struct.unpack("<d", struct.pack("<q", value))[0]))
_dtype = _or_none(lambda value: _DTYPES[value])
_print = _or_none(lambda value: f"other numbers (checksum {value:08x})")

# Arguments that must be equal on all ranks: name, the number that is exchanged, and how errors display that number.
FIELDS: dict[str, tuple[Callable[[_Arguments], int], Callable[[int], str]]] = {
    "function": (
        lambda x: x.log_fgate is not None,
        lambda value: "context_parallel_forgetting_attention" if value else "context_parallel_attention",
    ),
    "dtype": (lambda x: _dtype_of(x.key), _dtype),
    "batch": (lambda x: x.spec.batch, _plain),
    "num_heads": (lambda x: x.spec.num_heads, _plain),
    "num_kv_heads": (lambda x: x.spec.num_kv_heads, _plain),
    "head_dim": (lambda x: x.spec.head_dim, _plain),
    "causal": (lambda x: x.spec.causal, _truth),
    "window": (lambda x: _NONE if x.spec.window is None else x.spec.window, _plain),
    "scale": (lambda x: _bits(x.spec.scale), _number),
    "the sign of scale": (lambda x: x.spec.scale < 0, lambda value: "-" if value else "+"),
    "tolerance": (lambda x: _bits(x.spec.tolerance), _number),
    "dropout_p": (lambda x: _bits(x.spec.dropout_p), _number),
    "slopes": (lambda x: _checksum(x.spec.slopes), _print),
    "right_slopes": (lambda x: _checksum(x.spec.right_slopes), _print),
    "segment_ids": (lambda x: _NONE if x.spec.key_segments is None else 1, _or_none(lambda value: "given")),
    "the dtype of key_bias": (lambda x: _dtype_of(x.spec.key_bias), _dtype),
    "the dtype of log_fgate": (lambda x: _dtype_of(x.log_fgate), _dtype),
    "score_bound": (lambda x: _bits(x.score_bound), _number),
    "whether key or value needs a gradient": (lambda x: _needs_grad(x.key, x.value), _truth),
    "whether key_bias needs a gradient": (lambda x: _needs_grad(x.spec.key_bias), _truth),
    "whether log_fgate needs a gradient": (lambda x: _needs_grad(x.log_fgate), _truth),
}
OWN = ("status", "length", "key_mask", "dropout_seed")  # may differ between ranks


class GroupArguments(NamedTuple):
    """What a rank learns about the other ranks.

    Args:
        lengths: rows of each rank's shard.
        masked: whether any rank has a key mask.
        seed: the first rank's dropout seed, which all ranks use; 0 without dropout.
    """

    lengths: tuple[int, ...]
    masked: bool
    seed: int


def check_arguments(
    ranks: Ranks, spec: Spec | None, device: torch.device, *, key: Tensor | None = None, value: Tensor | None = None,
    log_fgate: Tensor | None = None, score_bound: float | None = None,
) -> GroupArguments:  # fmt: skip
    """Compares the arguments of all ranks. A rank whose own arguments are invalid passes no spec.

    Raises:
        ValueError: ranks differ (with the same message on every rank), or another rank's arguments are invalid.
    """
    numbers = [REFUSED] + [0] * (len(OWN) - 1 + len(FIELDS))
    if spec is not None and key is not None and value is not None:
        seed = 0 if spec.dropout_seed is None else int(spec.dropout_seed[0, 0])
        own = [READY, spec.query_len, spec.key_mask is not None, seed]
        arguments = _Arguments(spec, key, value, log_fgate, score_bound)
        numbers = own + [number(arguments) for number, _ in FIELDS.values()]
    rows = ranks.gathered(torch.tensor(numbers, device=device), "arguments").tolist()
    if spec is None:
        return GroupArguments((), masked=False, seed=0)
    refused = [rank for rank, (status, *_) in enumerate(rows) if status == REFUSED]
    if refused:
        raise ValueError(
            f"rank {refused[0]} of {ranks.count} rejected its arguments, so no rank computes; see the error on that rank"
        )
    for at, (name, (_, text)) in enumerate(FIELDS.items(), start=len(OWN)):
        for rank in range(1, ranks.count):
            if rows[rank][at] != rows[0][at]:
                raise ValueError(
                    f"rank {rank} of {ranks.count} was called with {name} = {text(rows[rank][at])} but rank 0 with "
                    f"{name} = {text(rows[0][at])}: except for their shards, all ranks must pass the same arguments"
                )
    return GroupArguments(tuple(row[1] for row in rows), any(row[2] for row in rows), rows[0][3])


def check_score_bound(score_bound: float | None, *, hides: bool) -> None:
    """Checks that a score bound is finite and nonnegative, and not combined with a mask, bias or gate.

    Raises:
        ValueError, TypeError: otherwise.
    """
    if score_bound is None:
        return
    if isinstance(score_bound, bool) or not isinstance(score_bound, int | float):
        raise TypeError(f"score_bound must be a Python number or None but is {score_bound!r}")
    if not 0.0 <= score_bound < math.inf:
        raise ValueError(f"score_bound is {score_bound} but bounds |scale·q·k|: it must be finite and nonnegative")
    if hides:
        raise ValueError(
            "score_bound does not work with key_mask, key_bias or log_fgate: it gives no bound for a query whose own key is "
            "hidden or biased; omit score_bound, and the halo is computed from norms"
        )
