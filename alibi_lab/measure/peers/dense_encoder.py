"""The arithmetic of the remote code of ALiBi encoders (Jina v2, MosaicBERT), eager and through SDPA.

The originals build a bias [1, H, T, T] once, add mask and bias to all scores in every layer, and also compute padding.
Formulas: `alibi_attn/hf/readers/encoder/layers.py`. Written from Günther et al. 2023 (arXiv:2310.19923) and Portes
et al. 2023 (arXiv:2312.17482), for evaluation only.
"""

import dataclasses
import math
import re
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

    @classmethod
    def of(cls, layers: int, width: int, vocabulary: int = 30528) -> "Sizes":
        """With heads of 64 and the usual feed-forward part."""
        return cls(layers, width, width // 64, 4 * width, vocabulary)

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
    """One layer: attention and a gated feed-forward part, each followed by a norm. The names are those of the weights."""

    def __init__(self, sizes: Sizes, *, eager: bool) -> None:
        super().__init__()
        self.attention = DenseSelfAttention(sizes, eager=eager)
        self.dense = nn.Linear(sizes.width, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.gated_layers = nn.Linear(sizes.width, 2 * sizes.inner, bias=False)
        self.wo = nn.Linear(sizes.inner, sizes.width)
        self.layernorm = nn.LayerNorm(sizes.width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        x = self.LayerNorm(self.dense(self.attention(x, mask, bias)) + x)
        gated, other = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(self.wo(F.gelu(gated) * other) + x)


class DenseEncoder(nn.Module):
    """The encoder, with the bias for `longest` tokens built once."""

    bias: Tensor

    def __init__(self, sizes: Sizes, longest: int, *, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.token_type_embeddings = nn.Embedding(2, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.layer = nn.ModuleList(DenseLayer(sizes, eager=eager) for _ in range(sizes.layers))
        places = torch.arange(longest)
        distances = (places[:, None] - places).abs()
        bias = torch.empty(1, sizes.heads, longest, longest)
        for head, slope in enumerate(alibi_slopes(sizes.heads)):
            torch.mul(distances, -float(slope), out=bias[0, head])
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] and [B, T] of 0 and 1 -> [B, T, E]."""
        length = input_ids.shape[1]
        x = self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings.weight[0])
        mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        bias = self.bias[:, :, :length, :length]
        if not self.eager and not bool(attention_mask.all()):
            bias = bias + mask
        for layer in self.layer:
            x = layer(x, mask, bias)
        return x

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Loads the weights of our encoder, which has query, key and value in one matrix."""
        self.load_state_dict({_FOLDERS.sub("", name): tensor for name, tensor in separated(state)})


def separated(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights of our encoder with query, key and value as three matrices, as other programs have them."""
    for name, tensor in state.items():
        parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True) if "Wqkv" in name else [("", tensor)]
        yield from ((name.replace("Wqkv", part), rows) for part, rows in parts)


_FOLDERS = re.compile(r"(^embeddings|^encoder|self|attention\.output|mlp)\.")  # of the names; here they are flat
