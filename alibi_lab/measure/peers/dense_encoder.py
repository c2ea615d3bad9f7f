"""The arithmetic of the remote code of ALiBi encoders (Jina v2, MosaicBERT), eager and through SDPA.

The originals build a bias [1, H, T, T] once, add mask and bias to all scores in every layer, and also compute padding.
Formulas: `alibi_attn/hf/readers/encoder/layers.py`. Written from Günther et al. 2023 (arXiv:2310.19923) and Portes
et al. 2023 (arXiv:2312.17482), for evaluation only.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an encoder."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 30528

    @property
    def initializer_range(self) -> float:
        """Makes queries and keys like noise of variance 1; our reach is wider than with the usual 0.02."""
        return self.width**-0.5

    @property
    def of_transformers(self) -> dict[str, Any]:
        """By the names of a BERT's config."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
        }


class DenseSelfAttention(nn.Module):
    """Attention with a dense bias: eager like the originals, or by SDPA with the bias as its mask."""

    def __init__(self, sizes: Sizes, *, eager: bool) -> None:
        super().__init__()
        self.heads, self.eager = sizes.heads, eager
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        """x [B, T, E], mask [B, 1, 1, T] to add, bias [1 or B, H, T, T]; for SDPA the mask is in the bias."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        if self.eager:
            scores = query @ key.transpose(-1, -2)
            scores = scores / math.sqrt(query.shape[-1])
            scores = scores + mask
            attended = (scores + bias).softmax(dim=-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return attended.transpose(1, 2).flatten(2)


class DenseLayer(nn.Module):
    """One layer: attention and a gated feed-forward part, each followed by a norm."""

    def __init__(self, sizes: Sizes, *, eager: bool) -> None:
        super().__init__()
        self.attention = DenseSelfAttention(sizes, eager=eager)
        self.dense = nn.Linear(sizes.width, sizes.width)
        self.attention_norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.gated_layers = nn.Linear(sizes.width, 2 * sizes.inner, bias=False)
        self.wo = nn.Linear(sizes.inner, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        x = self.attention_norm(self.dense(self.attention(x, mask, bias)) + x)
        gated, other = self.gated_layers(x).chunk(2, dim=-1)
        return self.norm(self.wo(F.gelu(gated) * other) + x)


class DenseEncoder(nn.Module):
    """The encoder, with the bias for `longest` tokens built once."""

    bias: Tensor

    def __init__(self, sizes: Sizes, longest: int, *, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.types = nn.Embedding(2, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.layers = nn.ModuleList(DenseLayer(sizes, eager=eager) for _ in range(sizes.layers))
        places = torch.arange(longest)
        distances = (places[:, None] - places).abs()
        bias = torch.empty(1, sizes.heads, longest, longest)
        for head, slope in enumerate(alibi_slopes(sizes.heads)):
            torch.mul(distances, -float(slope), out=bias[0, head])
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] and [B, T] of 0 and 1 -> [B, T, E]."""
        length = input_ids.shape[1]
        x = self.norm(self.words(input_ids) + self.types.weight[0])
        mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        bias = self.bias[:, :, :length, :length]
        if not self.eager and not bool(attention_mask.all()):
            bias = bias + mask
        for layer in self.layers:
            x = layer(x, mask, bias)
        return x

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Loads the weights of our encoder, which has query, key and value in one matrix."""
        own: dict[str, Tensor] = {}
        for name, tensor in separated(state):
            for ours, here in _NAMES.items():
                name = name.replace(ours, here)
            own[name] = tensor
        self.load_state_dict(own)


def separated(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights of our encoder with query, key and value as three matrices, as other programs have them."""
    for name, tensor in state.items():
        parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True) if "Wqkv" in name else [("", tensor)]
        yield from ((name.replace("Wqkv", part), rows) for part, rows in parts)


_NAMES = {
    "embeddings.word_embeddings.": "words.",
    "embeddings.token_type_embeddings.": "types.",
    "embeddings.LayerNorm.": "norm.",
    "encoder.layer.": "layers.",
    "attention.self.": "attention.",
    "attention.output.dense.": "dense.",
    "attention.output.LayerNorm.": "attention_norm.",
    "mlp.layernorm.": "norm.",
    "mlp.": "",
}
