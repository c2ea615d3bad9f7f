"""The layers of the encoder: embeddings, symmetric ALiBi attention, the gated feed-forward, and the parts of the heads.

    a   = attention(x):  softmax(q·kᵀ/√D − m·|i − j|)·v, dense, dropout
    h   = LayerNorm(x + a);   with extra_norm  h = LayerNorm(x + LayerNorm(x + a))
    out = LayerNorm(h + wo(dropout(act(g₁)·g₂))),   [g₁, g₂] = gated_layers(h);   gate="second": act(g₂)·g₁
          without gates, as in BERT:  LayerNorm(h + dropout(wo(act(wi(h)))))

Module names are those of MosaicBERT, so its state dicts load unmodified. Sources: Portes et al. 2023, MosaicBERT
(arXiv:2312.17482); Günther et al. 2023, Jina Embeddings 2 (arXiv:2310.19923); Shazeer 2020, gated units (arXiv:2002.05202).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from alibi_attn.attention.call.transforms import is_traced
from alibi_attn.attention.kept import Kept, attend
from alibi_attn.hf.readers.encoder.packing import Packing
from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
from alibi_attn.nn.linear.fastest import mapped

# Tokens whose feed-forward is in memory at once; a GPU needs more to be busy.
ROWS, ROWS_ON_GPU = 4096, 32768


def layer_norm(config: ALiBiBertConfig) -> nn.LayerNorm:
    """The norm used throughout the model."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class ALiBiBertEmbeddings(nn.Module):
    """Word and token type embeddings, a LayerNorm, dropout; no position embeddings."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, words: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """words [B, T, E], token_type_ids [B, T] or None for type 0 everywhere -> [B, T, E]."""
        of_types = self.token_type_embeddings
        types = of_types.weight[0] if token_type_ids is None else of_types(token_type_ids)
        return self.dropout(self.LayerNorm(words + types))


class ALiBiBertSelfAttention(nn.Module):
    """Queries, keys and values from one matrix, and symmetric attention with the published slopes."""

    # An instance may override this function, as `context_parallel` and `record_attention` do.
    attend = staticmethod(attend)

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout_p, self.backend = config.attention_probs_dropout_prob, config.backend
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias)
        self.layer_norm_q = layer_norm(config) if config.qk_norm else None
        self.layer_norm_k = layer_norm(config) if config.qk_norm else None

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """[B, T, E] -> [B, T, E]; both are [1, N, E] if packed."""
        query, key, value = mapped(self.Wqkv, x).chunk(3, dim=-1)
        if self.layer_norm_q is not None and self.layer_norm_k is not None:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        query, key, value = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (query, key, value))
        attended = self.attend(
            query,
            [Kept(key, value)],
            causal=False,
            key_mask=packing.mask if packing.places is None else None,
            segment_ids=packing.segments,
            positions=packing.positions,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        return attended.transpose(1, 2).flatten(2)


class ALiBiBertSelfOutput(nn.Module):
    """Dense, dropout, residual, LayerNorm."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(mapped(self.dense, attended)) + x)


class ALiBiBertAttention(nn.Module):
    """Self-attention and its output layer."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.self = ALiBiBertSelfAttention(config)
        self.output = ALiBiBertSelfOutput(config)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        return self.output(self.self(x, packing), x)


class ALiBiBertMLP(nn.Module):
    """The feed-forward, gated or not, with its residual and LayerNorm; without gradients a few thousand tokens at a time."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.is_gated, self.activates_second = config.gated, config.gate == "second"
        self.act: Callable[..., Tensor] = _ACTIVATIONS.get(config.gate_act) or ACT2FN[config.gate_act]
        if config.gated:
            self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        else:
            self.wi = nn.Linear(config.hidden_size, config.intermediate_size)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        at_once = ROWS_ON_GPU if x.is_cuda else ROWS
        if torch.is_grad_enabled() or is_traced() or x[..., 0].numel() <= at_once:
            return self.layernorm(self._inner(x) + x)
        output = torch.empty_like(x)
        for rows, into in zip(x.flatten(0, -2).split(at_once), output.flatten(0, -2).split(at_once), strict=True):
            into.copy_(self.layernorm(self._inner(rows) + rows))
        return output

    def _inner(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.dropout(mapped(self.wo, self.act(mapped(self.wi, x))))
        gated, other = mapped(self.gated_layers, x).chunk(2, dim=-1)
        if self.activates_second:
            gated, other = other, gated
        return mapped(self.wo, self.dropout(self.act(gated) * other))


class ALiBiBertLayer(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """One layer; the formulas are at the top of this file."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.attention = ALiBiBertAttention(config)
        self.layer_norm_1 = layer_norm(config) if config.extra_norm else None
        self.mlp = ALiBiBertMLP(config)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        attended = self.attention(x, packing)
        if self.layer_norm_1 is not None:
            attended = self.layer_norm_1(x + attended)
        return self.mlp(attended)


class ALiBiBertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(ALiBiBertLayer(config) for _ in range(config.num_hidden_layers))

    def needs_whole_rows(self) -> bool:
        """Whether `context_parallel` or `record_attention` has replaced its attention, so that texts must stay where they are."""
        return any("attend" in vars(module) for module in self.modules())


class ALiBiBertPooler(nn.Module):
    """tanh(dense(first token))"""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """[B, E] -> [B, E]"""
        return torch.tanh(mapped(self.dense, first))


class ALiBiBertTransform(nn.Module):
    """Dense, activation and LayerNorm before the vocabulary's logits."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.LayerNorm = layer_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(self.act(mapped(self.dense, x)))


class ALiBiBertPredictions(nn.Module):
    """Logits of the vocabulary; the decoder shares the word embeddings' weight if the config ties them."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__()
        self.transform = ALiBiBertTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return mapped(self.decoder, self.transform(x))
