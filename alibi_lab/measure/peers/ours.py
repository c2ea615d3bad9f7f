"""Our own attention in PyTorch, as users call it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.inspect import Norms, decode_with_norms
from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention

Prepare = Callable[[Inputs], Attention]


def ours(backend: str, **options: float) -> Prepare:
    """`alibi_attention`, `toeplitz_attention` of a table, or `forgetting_attention` of gates, its fourth argument, with the named
    backend. It can be sent to another process.
    """
    return functools.partial(_prepared, {"backend": backend, **options})


def _prepared(options: Mapping[str, Any], x: Inputs) -> Attention:
    if x.log_fgate is not None:
        return lambda q, k, v, f: forgetting_attention(q, k, v, f, x.slopes, **options)
    if (table := x.table) is not None:
        return lambda q, k, v: toeplitz_attention(q, k, v, table, **options)
    given = {"causal": x.causal, "key_mask": x.key_mask, "positions": x.points, **options}
    return lambda q, k, v: alibi_attention(q, k, v, x.slopes, **given)


def ours_with_cache(backend: str) -> Prepare:
    """Decoding as in a layer with a `KVCache`, which stores the norms of its keys and values."""

    def prepare(x: Inputs) -> Attention:
        known_norms, all_keys = Norms.of(x.key, x.value), ours(backend)(x)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = decode_with_norms(q, k, v, x.slopes, known_norms, backend=backend)
            return all_keys(q, k, v) if output is None else output

        return attention

    return prepare
