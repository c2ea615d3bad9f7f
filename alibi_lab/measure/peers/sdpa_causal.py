"""`scaled_dot_product_attention(is_causal=True)`, without ALiBi."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from alibi_lab.measure.peers import Attention, Peer


def causal(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """SDPA without a bias. A single query sees all keys; with several queries torch places the first one at position 0."""
    is_causal = query.shape[2] > 1
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def causal_by(kernel: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, Tensor], Attention]:
    """SDPA without a bias, restricted to one of its kernels."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
        run = causal(query, key, value, slopes)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return run(q, k, v)

        return attention

    return prepare


PEER = Peer("causal, no bias", causal, "SDPA is_causal=True; no ALiBi at all", biased=False)
