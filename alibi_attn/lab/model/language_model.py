"""The language models: pre-norm decoders that know nothing about positions but the four hooks of `position_method.py`.

    "modern"        RMS norm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), no biases, embeddings times √E
    "mpt"           LayerNorm without bias, W₂·GELU(W₁·x), no biases: MPT's block, so that a checkpoint can leave as one
    "baevski-auli"  LayerNorm, W₂·ReLU(W₁·x), biases, embeddings times √E, no norm at the end: fairseq's
                    `transformer_lm_wiki103`, the decoder of the paper (Baevski and Auli 2019, arXiv:1809.10853)

Input and output embeddings are shared (Vaswani et al. 2017, sec. 3.4). The parameters, in `state_dict()`:

    embedding.weight [V, E]                          or, with model.cutoffs, embedding.tables.N, .widen.N and softmax.classes
    blocks.N.attention_norm, blocks.N.ffn_norm       .weight, and .bias for "baevski-auli"
    blocks.N.q, .k, .v, .attention_out               .weight [E, E], and .bias for "baevski-auli"
    blocks.N.ffn_in, .ffn_out, .ffn_gate             .weight, and .bias for "baevski-auli"; only "modern" has the gate
    norm.weight                                      not "baevski-auli"
    position....                                     what the method learns

E is the width, V the vocabulary; other letters as in `attention/spec.py`. Read next: `train.py`.
"""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alibi_attn.lab.config import Architecture, ConfigError, ModelConfig, Stretch
from alibi_attn.lab.model.adaptive import AdaptiveInput, AdaptiveSoftmax
from alibi_attn.lab.model.attention import Context, LayerCache, attend
from alibi_attn.lab.model.position_method import (
    Bias,
    ContentBias,
    ForgetGates,
    LayerInput,
    Pass,
    PositionError,
    PositionMethod,
)
from alibi_attn.lab.model.positions import check_segments, check_stretch, position_method
from alibi_attn.nn.linear import Linear, linear

PREFILL_TOKENS = 2048  # of a prompt that are read at one time, so that only the caches grow with its length
_LOGITS_AT_ONCE = 1 << 20  # 4 MiB of fp32: within the caches of a core, and of a size that malloc uses again


class LanguageModel(nn.Module):
    """Tokens [B, T] in, logits [B, T, V] out, what may follow each token; or, with `targets`, their losses.

    The initial weights depend on the seed and on each parameter's own name and shape only, so that models of one seed
    that differ in their position method start from the same weights.

    Args:
        trained_length: L, in tokens; beyond it learned positions end, and a stretch begins.
        activation_checkpointing: in training, keep only what stands between two blocks and compute the rest again.

    `progress` is the share of the training's steps that are done, for methods that change while they are trained; the training
    sets it, and it is 1 otherwise.
    """

    def __init__(
        self, config: ModelConfig, *, trained_length: int, seed: int = 0, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config, self.trained_length = config, trained_length
        self.activation_checkpointing, self.progress = activation_checkpointing, 1.0
        self.position: PositionMethod = position_method(config, trained_length)
        self.embedding: nn.Embedding | AdaptiveInput
        if config.cutoffs:
            self.embedding = AdaptiveInput(config.vocab_size, config.embed_dim, config.cutoffs)
            self.softmax = AdaptiveSoftmax(config.embed_dim, config.cutoffs, dropout=config.softmax_dropout)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.dropout = _dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = nn.Identity() if config.architecture == "baevski-auli" else _norm(config)
        _initialize(self, seed)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        window: int | None = None,
        segment_ids: Tensor | None = None,
        context: Context | None = None,
        dropped: int = 0,
    ) -> Tensor:
        """Logits [B, T, V], or the losses [B, N] of the targets.

        Args:
            targets: [B, N], N ≤ T: the tokens that follow the last N inputs. Answered with −ln p of each in nats, fp32, and
                without the logits of the other inputs, or, with an adaptive softmax, of the whole vocabulary.
            caches: one per layer; the tokens follow those that the caches have seen.
            window: how many tokens each one may see in every layer, itself included. Positions stay as they are.
            segment_ids: [B, S], integers: the documents of all tokens, cached ones first. Attention stays inside a document, and
                distances are as in the row, which is all that relative methods look at; others are refused.
            context: the tokens are some of the sequences', and other processes have the others; no caches then.
            dropped: tokens before the cached ones that the caches no longer hold; positions count them.

        Raises:
            ConfigError: segment_ids and a method whose positions count from the start of the row.
            PositionError: learned positions beyond the trained length.
        """
        if segment_ids is not None:
            check_segments(self.config.method)
        past = len(caches[0]) if caches else 0
        total = past + tokens.shape[1]
        room = caches[0].keys.max_tokens if caches else None  # a full stream forgets as many as it is given
        start = dropped if context is None else context.start
        positions = torch.arange(past + start, total + start, device=tokens.device)
        x = self.embedding(tokens)
        if self.config.architecture != "mpt":
            x = x * math.sqrt(self.config.embed_dim)
        x = self.dropout(self.position.add(x, positions))
        asked = Pass(tokens.shape[1], total if room is None else min(total, room), self.progress)
        shared = None if self.position.per_layer else self.position.bias(asked)
        places = Places(self.position, positions, asked, shared, window, segment_ids, context)
        for layer, block in enumerate(self.blocks):
            if self.activation_checkpointing and self.training and torch.is_grad_enabled() and not caches:
                x = checkpoint(block, x, places, None, use_reentrant=False)
            else:
                x = block(x, places, caches[layer] if caches else None)
        if targets is None:
            return self._logits(self.norm(x))
        losses = self._losses(self.norm(x[:, x.shape[1] - targets.shape[1] :]), targets)
        return losses.clone()  # a tensor of its own, not a view: FSDP hangs its backward on it

    def stretched(self, stretch: Stretch, length: int) -> "LanguageModel":
        """A model for texts of `length` tokens that shares this one's weights and has its positions stretched.

        Where the length is not beyond the trained one, or the stretch is "none", it is this model itself. Nothing is
        changed here: slopes that are learned are stretched as they stand now. Evaluation calls it once for each length.

        Raises:
            ConfigError: the method has no such stretch; says which it has.
        """
        check_stretch(self.config.method, stretch)
        if stretch == "none" or length <= self.trained_length:
            return self
        position = self.position.stretched(stretch, length)
        twin = copy.copy(self)
        twin._modules = {**self._modules, "position": position}
        return twin

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _logits(self, x: Tensor) -> Tensor:
        if isinstance(self.embedding, AdaptiveInput):
            return self.softmax.log_prob(x, self.embedding)
        return linear(x, self.embedding.weight)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.embedding, AdaptiveInput):
            return self.softmax.loss(x, targets, self.embedding)
        logits = linear(x, self.embedding.weight).flatten(0, 1)
        # On a CPU some rows at a time, which stay in the cache from the product to the loss; the numbers are the same.
        rows = max(1, _LOGITS_AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        parts = zip(logits.split(rows), targets.flatten().split(rows), strict=True)
        losses = [F.cross_entropy(some.float(), after, reduction="none") for some, after in parts]
        return torch.cat(losses).view(targets.shape)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the tokens of one pass stand and what they may see: alike in every layer (see `LanguageModel.forward`).

    Args:
        shared: the bias of all layers, where the method is asked once.
    """

    method: PositionMethod
    positions: Tensor
    asked: Pass
    shared: Bias
    window: int | None
    segment_ids: Tensor | None
    context: Context | None

    def seen_by(self, x: Tensor, index: int, cache: LayerCache | None) -> Pass:
        """What the layer `index` asks with, whose attention has the normalized input x [B, T, E]."""
        seen = LayerInput(x, index, None if cache is None else cache.key_bias)
        return dataclasses.replace(self.asked, input=seen)

    def bias(self, at: Pass) -> Bias:
        """Of the layer that asks.

        Raises:
            PositionError: a number for every key, or gates, that are not one for every head and token.
        """
        if not self.method.per_layer:
            return self.shared
        x, found = at.layer.x, self.method.bias(at)
        if isinstance(found, ContentBias | ForgetGates):
            name = "key_bias" if isinstance(found, ContentBias) else "log_fgate"
            shape = getattr(found, name).shape
            if (len(shape), *shape[::2]) != (3, *x.shape[:2]):
                raise PositionError(
                    f"{name} has shape {list(shape)} but x {list(x.shape)}; it must be [B, H, T], a number "
                    "for every head and token of this pass"
                )
        return found


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); x [B, T, E]."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        width, hidden, bias = config.embed_dim, config.ffn_dim, config.architecture == "baevski-auli"
        self.num_heads, self.attention_dropout = config.num_heads, config.attention_dropout
        self.activation = _ACTIVATIONS[config.architecture]
        self.attention_norm = _norm(config)
        self.q = Linear(width, width, bias=bias)
        self.k = Linear(width, width, bias=bias)
        self.v = Linear(width, width, bias=bias)
        self.attention_out = Linear(width, width, bias=bias)
        self.ffn_norm = _norm(config)
        self.ffn_gate = Linear(width, hidden, bias=False) if config.architecture == "modern" else None
        self.ffn_in = Linear(width, hidden, bias=bias)
        self.ffn_out = Linear(hidden, width, bias=bias)
        self.dropout, self.activation_dropout = _dropout(config.dropout), _dropout(config.activation_dropout)

    def forward(self, x: Tensor, places: Places, cache: LayerCache | None) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (part(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        at = places.seen_by(y, self.index, cache)
        q, k = places.method.rotate(q, k, places.positions, at)
        bias = places.bias(at)
        if cache is not None:
            k, v, bias = cache.append(k, v, bias, layer=self)
        dropout_p = self.attention_dropout if self.training else 0.0
        seen: Any = {"window": places.window, "segment_ids": places.segment_ids, "context": places.context}
        y = attend(q, k, v, bias, dropout_p=dropout_p, **seen)
        x = x + self.dropout(self.attention_out(y.transpose(1, 2).flatten(-2)))
        y = self.ffn_norm(x)
        if self.ffn_gate is None:
            y = self.activation(self.ffn_in(y))
        else:
            y = self.activation(self.ffn_gate(y)) * self.ffn_in(y)
        added: Tensor = self.dropout(self.ffn_out(self.activation_dropout(y)))
        return x + added


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens that the model puts behind the prompt, one at a time, with cached keys; beyond the trained length too.

    Args:
        temperature: 0 takes the likeliest token, 1 samples what the model says.
        top_k: sample among the k likeliest only.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a number out of its range.
        PositionError: learned positions and more tokens than the trained length.
    """
    if not prompt or not all(0 <= token < model.config.vocab_size for token in prompt):
        raise ValueError(f"the prompt must have at least one token, each from 0 to {model.config.vocab_size - 1}")
    if max_new_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, temperature {temperature} and top_k {top_k}; "
            "pass max_new_tokens of 1 or more, temperature of 0 or more, top_k of 1 or more or None"
        )
    limit, needed = model.position.max_positions, len(prompt) + max_new_tokens - 1
    if limit is not None and needed > limit:
        raise PositionError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {needed} positions, but "
            f"{model.config.method} positions end at the trained length, {limit}; ask for at most "
            f"{max(limit + 1 - len(prompt), 0)} new tokens, shorten the prompt, or use another method"
        )
    return _continuation(model, prompt, max_new_tokens, temperature, top_k, seed)


def _continuation(
    model: LanguageModel, prompt: Sequence[int], max_new_tokens: int, temperature: float, top_k: int | None, seed: int
) -> Iterator[int]:
    device = model.device
    generator = torch.Generator().manual_seed(seed)
    caches = [LayerCache() for _ in model.blocks]
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            for chunk in tokens.split(PREFILL_TOKENS, dim=1):
                logits = model(chunk, caches=caches)[0, -1].float().cpu()
        token = _sample(logits, temperature, top_k, generator)
        yield token
        tokens = torch.tensor([[token]], device=device)


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def decoder_state(model: LanguageModel) -> dict[str, Tensor]:
    """The weights under the names that `hf.export.export_mpt` reads; the scale of the embeddings is 1.

    Raises:
        ConfigError: a model of another architecture, or with other positions than MPT has.
    """
    config = model.config
    if config.architecture != "mpt" or config.method != "alibi":
        raise ConfigError(
            f'the model has model.architecture {config.architecture!r} and model.method {config.method!r}, but an MPT is "mpt" '
            'and "alibi"; train one with --set model.architecture=mpt --set model.method=alibi'
        )
    return {
        ".".join(_DECODER_NAMES.get(part, part) for part in name.split(".")): tensor
        for name, tensor in model.state_dict().items()
    }


_DECODER_NAMES = {
    "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj", "attention_out": "attention.out_proj",
    "ffn_in": "ffn.0", "ffn_out": "ffn.3",
}  # fmt: skip

_ACTIVATIONS: dict[Architecture, Callable[[Tensor], Tensor]] = {"modern": F.silu, "mpt": F.gelu, "baevski-auli": F.relu}


def _norm(config: ModelConfig) -> nn.Module:
    if config.architecture == "modern":
        return nn.RMSNorm(config.embed_dim)
    return nn.LayerNorm(config.embed_dim, bias=config.architecture == "baevski-auli")


def _dropout(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()


@torch.no_grad()
def _initialize(model: LanguageModel, seed: int) -> None:
    """Norms 1, biases 0, vectors that the position method has made as they are. Matrices:

    Normal with deviation 1/√(inputs); what adds to the residual stream starts smaller, by 1/√(2·layers) (GPT-2). For
    "baevski-auli" Glorot's uniform range, times 1/√2 for q, k and v, as in fairseq; its tables are normal as well.
    """
    tables = ("embedding.weight", "embedding.tables.", "position.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.ndim == 1:
            if not name.startswith("position."):
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if model.config.architecture == "baevski-auli" and not name.startswith(tables):
            gain = math.sqrt(0.5) if name.endswith((".q.weight", ".k.weight", ".v.weight")) else 1.0
            nn.init.xavier_uniform_(parameter, gain=gain, generator=generator)
            continue
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        if name.endswith("_out.weight"):
            parameter.div_(math.sqrt(2 * model.config.num_layers))
