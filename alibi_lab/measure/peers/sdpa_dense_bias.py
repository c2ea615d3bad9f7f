"""`scaled_dot_product_attention` with the bias as its mask."""

import torch
from torch import Tensor
from torch.nn import functional

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer


def dense(inputs: Inputs) -> Attention:
    """SDPA with the bias as its mask, built once in the inputs' dtype."""
    return with_mask(dense_bias(inputs))


def with_mask(bias: Tensor) -> Attention:
    """SDPA with this mask."""
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def dense_bias(inputs: Inputs) -> Tensor:
    """[1 or B, H, T, S] in the query's dtype, with mask, table and gates; built head by head, which needs little memory."""
    query, key, gates, mask = inputs.query, inputs.key, inputs.log_fgate, inputs.key_mask
    t, s, device = query.shape[2], key.shape[2], query.device
    j = torch.arange(s, device=device)
    distance = j[s - t :, None] - j
    if inputs.points is not None:
        distance = torch.cdist(inputs.points[:, s - t :], inputs.points)
    batch = len(query) if gates is not None or mask is not None or inputs.points is not None else 1
    bias = torch.empty(batch, len(inputs.slopes), t, s, dtype=query.dtype, device=device)
    for h, slope in enumerate(inputs.slopes):
        row = -slope * (distance if inputs.causal else distance.abs())
        if inputs.table is not None:
            row = inputs.table[h, distance.clamp(min=0)]
        if gates is not None:
            c = gates[:, h].double().cumsum(-1)
            row = (row + c[:, s - t :, None] - c[:, None]).float()
        if inputs.causal:
            row = row.masked_fill(distance < 0, -torch.inf)
        bias[:, h] = row if mask is None else row.masked_fill(~mask[:, None], -torch.inf)
    return bias


PEER = Peer("SDPA + dense bias", dense)
