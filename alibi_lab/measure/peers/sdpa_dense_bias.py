"""`scaled_dot_product_attention` with the bias as its mask."""

import torch
from torch import Tensor
from torch.nn import functional

from alibi_lab.measure.peers import Attention, Peer


def dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Attention:
    """SDPA with the bias as its mask."""
    return with_mask(dense_bias(query, key, slopes))


def with_mask(bias: Tensor) -> Attention:
    """SDPA with this mask."""
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def dense_bias(query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
    """[1, H, T, S] in the query's dtype; built head by head, so that building it needs little extra memory."""
    t, s = query.shape[2], key.shape[2]
    j = torch.arange(s, device=query.device)
    bias = torch.empty(1, len(slopes), t, s, dtype=query.dtype, device=query.device)
    distance = j[s - t :, None] - j
    for h, slope in enumerate(slopes):
        bias[0, h] = (-slope * distance).masked_fill_(distance < 0, -torch.inf)
    return bias


PEER = Peer("SDPA + dense bias", dense, "attn_mask, built once in the inputs' dtype")
