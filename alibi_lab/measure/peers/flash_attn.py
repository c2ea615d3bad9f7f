"""flash-attn 2 with `alibi_slopes`, if it is installed."""

from torch import Tensor

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer, missing


def flash(inputs: Inputs) -> Attention:
    """flash-attn with its layout [B, T, H, D]; a single query uses the function for KV caches, which splits the keys."""
    from flash_attn import flash_attn_func, flash_attn_with_kvcache  # type: ignore[import-not-found]

    run = flash_attn_func if inputs.query.shape[2] > 1 else flash_attn_with_kvcache

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return run(q, k, v, causal=True, alibi_slopes=inputs.slopes).transpose(1, 2)

    return attention


def installed() -> list[Peer]:
    """The peer, or an empty list if flash-attn is not installed."""
    if missing(["flash_attn"]):
        return []
    return [Peer("flash-attn 2", flash)]
