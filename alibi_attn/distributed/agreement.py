"""Agreement: ranks tell one another what they were called with, and all of them raise the same error where one differs.

Every rank takes part, also one whose arguments are refused: else the others would wait for it.
"""

import math
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_attn.attention.spec import EPS, AttentionSpec, dtype_name
from alibi_attn.distributed.exchange import Ranks

Spec = AttentionSpec[Tensor]

_DTYPES = (*EPS,)
_NONE = -1  # an argument that was not given; none of the numbers below is negative

REFUSED, READY = 0, 1


def _bits(number: float) -> int:
    """The 63 lower bits of an fp64 number; its sign goes beside them, in `scale sign`."""
    return int(struct.unpack("<q", struct.pack("<d", abs(number)))[0])


def _number(bits: int) -> str:
    return repr(struct.unpack("<d", struct.pack("<q", bits))[0])


def _flag(value: int) -> str:
    return "given" if value != _NONE else "None"


def _plain(value: int) -> str:
    return "None" if value == _NONE else str(value)


def _dtype(value: int) -> str:
    return "None" if value == _NONE else _DTYPES[value]


def _truth(value: int) -> str:
    return str(bool(value))


def _print(value: int) -> str:
    return "None" if value == _NONE else f"other numbers (checksum {value:08x})"


# What must be the same on all ranks: the argument's name, and how its number is shown.
FIELDS: dict[str, Callable[[int], str]] = {
    "function": lambda value: "context_parallel_forgetting_attention" if value else "context_parallel_attention",
    "dtype": _dtype,
    "batch": _plain,
    "num_heads": _plain,
    "num_kv_heads": _plain,
    "head_dim": _plain,
    "causal": _truth,
    "window": _plain,
    "scale": _number,
    "the sign of scale": lambda value: "-" if value else "+",
    "tolerance": _number,
    "dropout_p": _number,
    "slopes": _print,
    "right_slopes": _print,
    "segment_ids": _flag,
    "the dtype of key_bias": _dtype,
    "the dtype of log_fgate": _dtype,
    "score_bound": lambda value: "None" if value == _NONE else _number(value),
    "whether key or value needs a gradient": _truth,
    "whether key_bias needs a gradient": _truth,
    "whether log_fgate needs a gradient": _truth,
}
OWN = ("status", "length", "key_mask", "dropout_seed")  # a rank's own


class Agreed(NamedTuple):
    """What a rank learns of the others.

    Args:
        lengths: rows of every rank's shard.
        masked: whether some rank has a key mask.
        seed: the first rank's seed of dropout, which is everybody's; 0 without dropout.
    """

    lengths: tuple[int, ...]
    masked: bool
    seed: int


def agreed(
    ranks: Ranks, spec: Spec | None, device: torch.device, *, key: Tensor | None = None, value: Tensor | None = None,
    key_bias: Tensor | None = None, log_fgate: Tensor | None = None, score_bound: float | None = None,
) -> Agreed:  # fmt: skip
    """What the ranks were called with; without a spec, for arguments that were refused, nothing.

    Raises:
        ValueError: ranks that differ, the same sentence on all of them; and another rank's arguments were refused.
    """
    numbers = [REFUSED] + [0] * (len(OWN) - 1 + len(FIELDS))
    if spec is not None and key is not None and value is not None:
        seed = 0 if spec.dropout_seed is None else int(spec.dropout_seed[0, 0])
        own = [READY, spec.query_len, spec.key_mask is not None, seed]
        numbers = own + _told(spec, key, value, key_bias, log_fgate, score_bound)
    told = ranks.gathered(torch.tensor(numbers, device=device), "what they were called with").tolist()
    if spec is None:
        return Agreed((), masked=False, seed=0)
    refused = [rank for rank, (status, *_) in enumerate(told) if status == REFUSED]
    if refused:
        raise ValueError(
            f"rank {refused[0]} of {ranks.count} refused its arguments, so no rank computes; its own error says why"
        )
    for at, (name, shown) in enumerate(FIELDS.items(), start=len(OWN)):
        for rank in range(1, ranks.count):
            if told[rank][at] != told[0][at]:
                raise ValueError(
                    f"rank {rank} of {ranks.count} was called with {name} = {shown(told[rank][at])} but rank 0 with {name} = "
                    f"{shown(told[0][at])}: all ranks of a group pass the same, but for their shards"
                )
    return Agreed(tuple(row[1] for row in told), any(row[2] for row in told), told[0][3])


def _told(
    spec: Spec, key: Tensor, value: Tensor, key_bias: Tensor | None, log_fgate: Tensor | None, score_bound: float | None
) -> list[int]:
    """The numbers of `FIELDS`, in its order."""
    differentiable = torch.is_grad_enabled()

    def wants(*tensors: Tensor | None) -> bool:
        return differentiable and any(x is not None and x.requires_grad for x in tensors)

    return [
        log_fgate is not None, _DTYPES.index(dtype_name(key.dtype)), spec.batch, spec.num_heads, spec.num_kv_heads, spec.head_dim,
        spec.causal, _NONE if spec.window is None else spec.window, _bits(spec.scale), spec.scale < 0, _bits(spec.tolerance),
        _bits(spec.dropout_p), _checksum(spec.slopes), _checksum(spec.right_slopes), _NONE if spec.key_segments is None else 1,
        _dtype_of(key_bias), _dtype_of(log_fgate), _NONE if score_bound is None else _bits(score_bound), wants(key, value),
        wants(key_bias), wants(log_fgate),
    ]  # fmt: skip


def _dtype_of(tensor: Tensor | None) -> int:
    return _NONE if tensor is None else _DTYPES.index(dtype_name(tensor.dtype))


def _checksum(slopes: Tensor | None) -> int:
    return _NONE if slopes is None else zlib.crc32(slopes.detach().double().cpu().contiguous().numpy().tobytes())


def check_score_bound(score_bound: float | None, *, hides: bool) -> None:
    """It is finite and not negative, and no mask, bias or gate comes with it.

    Raises:
        ValueError, TypeError: otherwise.
    """
    if score_bound is None:
        return
    if isinstance(score_bound, bool) or not isinstance(score_bound, int | float):
        raise TypeError(f"score_bound must be a Python number or None but is {score_bound!r}")
    if not 0.0 <= score_bound < math.inf:
        raise ValueError(f"score_bound is {score_bound} but bounds |scale·q·k|: finite and not negative")
    if hides:
        raise ValueError(
            "score_bound comes with a key_mask, key_bias or log_fgate, but promises nothing for a query whose own key is hidden "
            "or has a bias; leave score_bound out, and the halo is found from norms"
        )
