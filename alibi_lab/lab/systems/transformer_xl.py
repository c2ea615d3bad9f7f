"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860): relative positions, and a memory between segments in training too.

    e_ij = ((q_i + u) · k_j + (q_i + v) · W_R R_{i−j}) / √D        sec. 3.3; R: sinusoids of the distance, [E]

u and v are vectors per head that all layers share, W_R [E, E] is a matrix per layer. A training example is read in two
segments; in every layer, the second sees the keys and values of the first one, without gradients (sec. 3.2). The paper caches
hidden states instead, so that gradients also reach W_k and W_v through the memory; the forward pass is the same. It also keeps
the memory from one training step to the next; here a memory starts empty with every example. Next: `longformer.py`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_lab.lab.config import EvalConfig, ModelConfig
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod
from alibi_lab.position_methods import Look
from alibi_lab.records import Json

if TYPE_CHECKING:
    from alibi_lab.lab.data.corpus import Corpus
    from alibi_lab.lab.model.language_model import LanguageModel

WAVE_BASE = 10_000.0
MEMORIES = (0, 1, 2, 4, 8, 16)  # at test time, in segments


class RelativeSinusoids(PositionMethod):
    """The relative positions alone, without segments; decodes with a cache. 2·E + layers·E² parameters."""

    look = Look("Transformer-XL's positions", "#5b6b1f", "#b9cc6a", "3")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.u = nn.Parameter(torch.zeros(config.embed_dim))
        self.v = nn.Parameter(torch.zeros(config.embed_dim))
        self.projection = nn.Parameter(torch.empty(config.num_layers, config.embed_dim, config.embed_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        content, position = self.scores(q, k, at.layer.index)
        weights = (content + position).masked_fill(~at.visible(q.device), -math.inf).softmax(-1)
        return F.dropout(weights, self.config.attention_dropout, self.training).to(v.dtype) @ v

    def scores(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The two terms of e_ij, [B, H, T, S] each; those of keys to the right are undefined."""
        heads, key_len, head_dim = q.shape[1], k.shape[-2], q.shape[-1]
        u, v = (bias.to(q.dtype).view(heads, 1, head_dim) for bias in (self.u, self.v))
        backwards = torch.arange(key_len - 1, -1, -1, device=q.device)
        r = sinusoids(backwards, self.config.embed_dim).to(q.dtype) @ self.projection[layer].mT.to(q.dtype)
        r = r.unflatten(-1, (heads, head_dim)).transpose(0, 1)  # [H, S, D], from the largest distance to 0
        scale = 1 / math.sqrt(head_dim)
        return (q + u) @ k.mT * scale, _shifted((q + v) @ r.mT) * scale


class TransformerXL(RelativeSinusoids):
    """Relative positions, segments of half the trained length, and a memory of as many tokens."""

    look = Look("Transformer-XL", "#a14d00", "#f2a65a", "|")

    def __init__(self, config: ModelConfig, trained_length: int) -> None:
        super().__init__(config, trained_length)
        self.segment: int | None = max(1, trained_length // 2)
        self.memory = self.segment

    @classmethod
    def curves(
        cls, model: "LanguageModel", corpus: "Corpus", config: EvalConfig
    ) -> Mapping[str, Mapping[str, Sequence[Json]]]:
        """The loss by the length of the memory at test time: the second halves of rows of the longest length."""
        position, length = model.position, config.lengths[-1]
        if not isinstance(position, cls) or position.segment is None:
            raise TypeError(f"the memory is a test of TransformerXL, but the model's positions are {type(position)}")
        count = max(1, config.tokens // length)
        starts = torch.linspace(0, len(corpus.valid) - length - 1, count).long()
        rows = torch.stack([corpus.valid[start : start + length + 1] for start in starts]).to(model.device).long()
        memories = [many * position.segment for many in MEMORIES]
        nats = [_nats(model, rows, memory) for memory in memories]
        return {"memory": {"memory": memories, "nats": nats, "tokens": [count * (length // 2)] * len(nats)}}


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[N, width] fp32: sin(p·θ_c), then cos(p·θ_c), θ_c = 10000^(−2c/width)."""
    pairs = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * WAVE_BASE ** (-pairs / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _nats(model: "LanguageModel", rows: Tensor, memory: int) -> float:
    twin = copy.deepcopy(model).eval()
    twin.position.memory = memory
    with torch.inference_mode():
        half = rows.shape[1] // 2
        parts = [twin(row[:, :-1], targets=row[:, half + 1 :]) for row in rows.split(8)]
    return float(torch.cat(parts).double().mean())


def _shifted(x: Tensor) -> Tensor:
    """x [B, H, T, S], whose column c is of distance S − 1 − c, as [B, H, T, S] by key: appendix B of the paper.

    Row t moves left by T − 1 − t. Entries of keys to the right are arbitrary.
    """
    batch, heads, query_len, key_len = x.shape
    padded = F.pad(x, (1, 0)).view(batch, heads, key_len + 1, query_len)
    return padded[:, :, 1:].reshape(batch, heads, query_len, key_len)
