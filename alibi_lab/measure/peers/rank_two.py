"""The rank-2 trick: ALiBi as additional head dimensions of causal SDPA."""

import torch
from torch import Tensor
from torch.nn import functional

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer

# The trick adds a number as large as the farthest key's bias to a score; the error is about four fp32 roundings of it.
SCORE_ERROR = 4 * 2.0**-24


def rank_two(inputs: Inputs) -> Attention:
    """m·j as a product (m·i is equal for all keys). j is split into base-256 digits, which are exact even in bfloat16."""
    query, key, slopes = inputs.query, inputs.key, inputs.slopes
    _, h, n, d = query.shape
    if key.shape[2] != n:
        raise ValueError(
            f"T is {n} and S is {key.shape[2]} but the two must be equal: torch's causal mask begins at key 0"
        )
    digits = 2 if n <= 2**16 else 3
    wide = digits if query.device.type == "cpu" else 8  # GPU kernels need multiples of 8
    base = 256 ** torch.arange(digits, device=query.device)
    position = (torch.arange(n, device=query.device)[:, None] // base % 256).to(query.dtype)
    factor = (slopes[:, None] * base * d**0.5).to(query.dtype)
    position, factor = (functional.pad(x, (0, wide - digits)) for x in (position, factor))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.cat([q, factor[None, :, None].expand(len(q), h, n, wide)], -1)
        k = torch.cat([k, position.expand(len(k), h, n, wide)], -1)
        v = functional.pad(v, (0, wide))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d**-0.5)[..., :d]

    return attention


PEER = Peer("rank-2 trick", rank_two, score_error=SCORE_ERROR)
