"""Few queries or few heads: the keys are split among programs, and the results of the parts are merged."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import DECODE_QUERIES, WHOLE_BYTES, tile_shape
from alibi_attn.attention.backends.fused.devices import is_large, processors
from alibi_attn.attention.backends.fused.launch import (
    Argument,
    constants,
    launch,
    number,
    of_shape,
    pointer,
    rows_of,
    tiling,
)
from alibi_attn.attention.backends.fused.space import allotted
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value
Into = tuple[Tensor, Tensor, Tensor | None]  # output, lse, given lse


def is_split(spec: Spec, query: Tensor) -> bool:
    """Whether the heads of a group are packed together and the keys are split among programs: for few queries, or few heads.

    The visited tiles do not depend on it, because other sequences in the batch must not change them.
    """
    few = spec.batch * spec.num_heads < processors(query.device)
    return spec.query_len <= DECODE_QUERIES or (spec.query_len <= TILE and few)


def reads_whole(spec: Spec, key: Tensor) -> bool:
    """Whether decoding without masks and biases of keys needs no plan, because the keys are few."""
    return spec.query_len <= DECODE_QUERIES and 2 * key.numel() * key.element_size() <= WHOLE_BYTES


def decode_parts(spec: Spec, query: Tensor) -> int:
    """The number of parts that the keys are split into: enough programs for the device, of at least four tiles each."""
    programs = 2 * processors(query.device)
    return max(1, min(programs // (spec.batch * spec.num_kv_heads), -(-spec.key_len // (4 * TILE)), 64))


def forward_in_parts(spec: Spec, call: Argument, inputs: Inputs, visited: Argument, into: Into) -> None:
    """Fills `into`, see `backend.forward`: parts of the keys, and then their sum."""
    from alibi_attn.attention.backends.fused.kernels.decode import decode_kernel

    (query, key, value), (output, lse, given_lse) = inputs, into
    device, parts = query.device, decode_parts(spec, query)
    shape = tile_shape("decode", query.dtype, spec.head_dim, large=is_large(device))
    chunks = -(-spec.group * spec.query_len // shape.queries)
    outputs, lses = memory_of_parts(parts, query, lse)
    launch(
        device, decode_kernel, (spec.batch * spec.num_kv_heads, chunks, parts), of_shape(shape), rows_of(query), rows_of(key),
        rows_of(value), outputs, lses, call, visited, tiling(spec.head_dim, spec.causal, shape[:2], None),
    )  # fmt: skip
    merge(call, query, parts, outputs, lses, (rows_of(output), pointer(lse), pointer(given_lse)))


def memory_of_parts(parts: int, query: Tensor, lse: Tensor) -> list[Argument]:
    """Scratch memory for the outputs and lse of all parts, fp32."""
    return allotted(query.device, *((parts * x.numel(), torch.float32) for x in (query, lse)))


def merge(
    call: Argument, query: Tensor, parts: int, outputs: Argument, lses: Argument, into: tuple[Argument, ...]
) -> None:
    """Sums the parts; `into` is the output, its lse and the given lse."""
    from alibi_attn.attention.backends.fused.kernels.decode import merge_kernel

    rows = query.shape[:3].numel()
    launch(
        query.device, merge_kernel, (rows, 1, 1),
        constants(SLOTS=1 << (parts - 1).bit_length(), D=query.shape[3], num_warps=1), outputs, lses, *into, call,
        number(parts), number(rows),
    )  # fmt: skip
