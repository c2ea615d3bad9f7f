"""Checks that all ranks were called with the same arguments; on a mismatch every rank raises the same error.

Every rank takes part, even if its own arguments are invalid: otherwise the others would wait for it.
"""

import json
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.attention.call.options import BiasOptions, SharedOptions
from alibi_attn.attention.call.reads import DROPOUT, Reads
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.distributed.exchange import Ranks

Spec = AttentionSpec[Tensor]

_READS = Reads(
    "context parallelism",
    DROPOUT
    | {"causal", "right_slopes", "window", "key_mask", "query_segments", "key_segments"}
    | {"key_bias", "sink_logits", "return_lse"},
    instead="alibi_attention in one process",
)


class GatedShardOptions(SharedOptions, BiasOptions[Tensor], total=False):
    """The keyword arguments of a gated call that `make_spec` checks; as for `forgetting_attention`."""

    key_mask: Tensor | None
    segment_ids: Tensor | None
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
    _READS.check(spec)
    if spec.query_len != spec.key_len:
        raise ValueError(
            f"query has {spec.query_len} rows and key {spec.key_len} but context parallelism is self-attention: pass the same "
            "rows of the sequence as query, key and value"
        )
    return spec


MOST_BYTES = 2048  # of the values below as JSON; every rank sends this many, and then the checksums
_ODD = -7046029254386353131  # 2⁶⁴/φ, which spreads the bits of a number


class Arguments(NamedTuple):
    """The arguments of one rank's call."""

    spec: Spec
    key: Tensor
    value: Tensor
    log_fgate: Tensor | None
    score_bound: float | None


def _checksum(x: Tensor, device: torch.device) -> Tensor:
    """Of the bits of all numbers and their order, 0-d int64; on the device, because reading them would synchronize."""
    bits = x.detach().to(device, torch.float64).flatten().contiguous().view(torch.int64)
    mixed = (bits ^ (bits >> 32)) * _ODD
    return ((mixed ^ (mixed >> 29)) * (2 * torch.arange(bits.numel(), device=device) + 1)).sum()


def _given(field: str) -> Callable[[Arguments], str | None]:
    return lambda x: None if getattr(x.spec, field) is None else "given"


def _dtype_of(tensor: Tensor | None) -> str | None:
    return None if tensor is None else dtype_name(tensor.dtype)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# Tensors of numbers, which are compared by their checksums.
NUMBERS = ("slopes", "right_slopes", "sink_logits")
_SIZES = ("batch", "num_heads", "num_kv_heads", "head_dim", "causal", "window", "scale", "tolerance", "dropout_p")
# Arguments that must be equal on all ranks, as errors name and display them.
FIELDS: dict[str, Callable[[Arguments], str | float | None]] = {
    "function": lambda x: f"context_parallel_{'attention' if x.log_fgate is None else 'forgetting_attention'}",
    "dtype": lambda x: _dtype_of(x.key),
    **{name: operator.attrgetter(f"spec.{name}") for name in _SIZES},
    **{name: _given(name) for name in NUMBERS},
    "segment_ids": _given("key_segments"),
    "the dtype of key_bias": lambda x: _dtype_of(x.spec.key_bias),
    "the dtype of log_fgate": lambda x: _dtype_of(x.log_fgate),
    "score_bound": lambda x: None if x.score_bound is None else float(x.score_bound),
    "whether key or value needs a gradient": lambda x: _needs_grad(x.key, x.value),
    "whether key_bias needs a gradient": lambda x: _needs_grad(x.spec.key_bias),
    "whether log_fgate needs a gradient": lambda x: _needs_grad(x.log_fgate),
}


def check_arguments(ranks: Ranks, given: Arguments | None, device: torch.device) -> tuple[tuple[int, ...], bool, int]:
    """Compares the arguments of all ranks. A rank whose own arguments are invalid passes None.

    Returns:
        lengths: rows of each rank's shard.
        masked: whether any rank has a key mask.
        seed: the first rank's dropout seed, which all ranks use; 0 without dropout.

    Raises:
        ValueError: ranks differ (with the same message on every rank), or another rank's arguments are invalid.
    """
    sent = None
    if given is not None:
        seed = 0 if given.spec.dropout_seed is None else int(given.spec.dropout_seed[0, 0])
        own = (given.spec.query_len, given.spec.key_mask is not None, seed)  # may differ between ranks
        sent = [own, {name: value_of(given) for name, value_of in FIELDS.items()}]
    message = bytearray(json.dumps(sent).encode().ljust(MOST_BYTES))
    tensors = [None if given is None else getattr(given.spec, name) for name in NUMBERS]
    none = torch.zeros((), dtype=torch.int64, device=device)
    checksums = torch.stack([none if x is None else _checksum(x, device) for x in tensors])
    numbers = torch.cat(
        [torch.frombuffer(message, dtype=torch.uint8).to(device, non_blocking=True), checksums.view(torch.uint8)]
    )
    rows = [_read(row) for row in ranks.gathered(numbers, "arguments").cpu()]
    if given is None:
        return (), False, 0
    if None in rows:
        raise ValueError(
            f"rank {rows.index(None)} of {ranks.count} rejected its arguments, so no rank computes; see the error on that rank"
        )
    first = rows[0][1]
    for name in FIELDS:
        for rank, (_, fields) in enumerate(rows):
            if fields[name] != first[name]:
                raise ValueError(
                    f"rank {rank} of {ranks.count} was called with {name} = {fields[name]} but rank 0 with "
                    f"{name} = {first[name]}: except for their shards, all ranks must pass the same arguments"
                )
    lengths, masked, seeds = zip(*(own for own, _ in rows), strict=True)
    return lengths, any(masked), seeds[0]


def _read(row: Tensor) -> Any:
    """What one rank has sent, with the checksums among its fields."""
    sent = json.loads(bytes(row[:MOST_BYTES].tolist()))
    if sent is not None:
        for name, checksum in zip(NUMBERS, row[MOST_BYTES:].clone().view(torch.int64).tolist(), strict=True):
            if sent[1][name] is not None:
                sent[1][name] = f"other numbers (checksum {checksum % 2**64:016x})"
    return sent


def check_score_bound(score_bound: float | None, *, hides: bool) -> None:
    """Checks that a score bound is finite and nonnegative, and not combined with a mask, bias or gate.

    Raises:
        ValueError, TypeError: the score bound fails one of these checks.
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
