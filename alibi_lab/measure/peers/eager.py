"""Attention written out by hand, as in most models."""

import torch
from torch import Tensor

from alibi_lab.measure.inputs import Inputs
from alibi_lab.measure.peers import Attention, Peer
from alibi_lab.measure.peers.sdpa_dense_bias import dense_bias


def eager(inputs: Inputs) -> Attention:
    """Eager attention with the softmax in fp32, as in `transformers`, and the bias built once."""
    bias = dense_bias(inputs)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    return attention


PEER = Peer("eager", eager)
