"""`scaled_dot_product_attention` without ALiBi: causal, or with the mask of padding."""

from collections.abc import Callable

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer


def causal(inputs: Inputs) -> Attention:
    """SDPA without a bias. A single query sees all keys; with several queries torch places the first one at position 0."""
    is_causal = inputs.query.shape[2] > 1
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def causal_by(kernel: SDPBackend) -> Callable[[Inputs], Attention]:
    """SDPA without a bias, restricted to one of its kernels."""
    return lambda inputs: sdpa_kernel(kernel)(causal(inputs))


def masked(inputs: Inputs) -> Attention:
    """SDPA with the mask [B, 1, 1, S] of padding."""
    assert inputs.key_mask is not None
    shown = inputs.key_mask[:, None, None]
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)


PEER = Peer("causal, no bias", causal, "SDPA is_causal=True; no ALiBi at all", biased=False)
FLASH = Peer(
    "causal, no bias, flash", causal_by(SDPBackend.FLASH_ATTENTION), f"{PEER.note}; flash kernel", biased=False
)
CUDNN = Peer(
    "causal, no bias, cuDNN", causal_by(SDPBackend.CUDNN_ATTENTION), f"{PEER.note}; cuDNN's kernel", biased=False
)
PLAIN = Peer("SDPA, no bias", lambda inputs: functional.scaled_dot_product_attention, "no ALiBi at all", biased=False)
MASKED = Peer("SDPA + mask, no bias", masked, "attn_mask [B, 1, 1, S]; no ALiBi at all", biased=False)
