"""Our own attention in PyTorch, as users call it."""

from collections.abc import Callable

from torch import Tensor

from alibi_attn import alibi_attention
from alibi_attn.inspect import Norms, decode_with_norms
from alibi_lab.measure.peers import Attention, Peer

Prepare = Callable[[Tensor, Tensor, Tensor, Tensor], Attention]


def ours(backend: str, *, dropout_p: float = 0.0) -> Prepare:
    """`alibi_attention` with the named backend."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        return lambda q, k, v: alibi_attention(q, k, v, slopes, backend=backend, dropout_p=dropout_p)

    return prepare


def ours_with_cache(backend: str) -> Prepare:
    """Decoding as in a layer with a `KVCache`, which stores the norms of its keys and values."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        known_norms, all_keys = Norms.of(key, value), ours(backend)(query, key, value, slopes)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = decode_with_norms(q, k, v, slopes, known_norms, backend=backend)
            return all_keys(q, k, v) if output is None else output

        return attention

    return prepare


def ours_dropping(dropout_p: float) -> Peer:
    """Our attention with dropout, as in training."""
    note = f"backend='auto', dropout_p={dropout_p}"
    return Peer("ours, dropout", ours("auto", dropout_p=dropout_p), note, dropout_p=dropout_p)
