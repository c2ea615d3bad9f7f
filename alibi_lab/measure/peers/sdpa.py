"""`scaled_dot_product_attention` without ALiBi: causal, or with the mask of padding."""

from collections.abc import Callable

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer


def sdpa(inputs: Inputs) -> Attention:
    """SDPA without a bias. A single query sees all keys; with several queries torch places the first one at position 0."""
    is_causal = inputs.causal and inputs.query.shape[2] > 1
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None]
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


def restricted_to(kernel: SDPBackend) -> Callable[[Inputs], Attention]:
    """SDPA without a bias, restricted to one of its kernels."""
    return lambda inputs: sdpa_kernel(kernel)(sdpa(inputs))


PEER = Peer("causal, no bias", sdpa, biased=False)
FLASH = Peer("causal, no bias, flash", restricted_to(SDPBackend.FLASH_ATTENTION), biased=False)
CUDNN = Peer("causal, no bias, cuDNN", restricted_to(SDPBackend.CUDNN_ATTENTION), biased=False)
PLAIN = Peer("SDPA, no bias", sdpa, biased=False)
MASKED = Peer("SDPA + mask, no bias", sdpa, biased=False)
