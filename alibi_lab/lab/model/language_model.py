"""The language models: pre-norm decoders whose positions come only from the hooks of `position_method.py`.

    "modern"        RMS norm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), no biases, embeddings times √E
    "mpt"           LayerNorm without bias, W₂·GELU(W₁·x), no biases: MPT's block, so that checkpoints can be exported
    "baevski-auli"  LayerNorm, W₂·ReLU(W₁·x), biases, embeddings times √E, no norm at the end: fairseq's
                    `transformer_lm_wiki103`, the decoder of the paper (Baevski and Auli 2019, arXiv:1809.10853)

Input and output embeddings are shared (Vaswani et al. 2017, sec. 3.4). The parameters, in `state_dict()`:

    embedding.weight [V, E]                          or, with model.cutoffs, embedding.tables.N, .widen.N and softmax.classes
    blocks.N.attention_norm, blocks.N.ffn_norm       .weight, and .bias for "baevski-auli"
    blocks.N.q, .k, .v, .attention_out               .weight [E, E], and .bias for "baevski-auli"
    blocks.N.ffn_in, .ffn_out, .ffn_gate             .weight, and .bias for "baevski-auli"; only "modern" has the gate
    norm.weight                                      not "baevski-auli"
    position....                                     the parameters of the method

E is the width, V the vocabulary; other letters as in `attention/call/spec.py`. Read next: `train.py`.
"""

import copy
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alibi_attn.nn.linear.fastest import Linear, linear
from alibi_lab.lab.config import Architecture, ConfigError, ModelConfig, Stretch
from alibi_lab.lab.model.adaptive import AdaptiveInput, AdaptiveSoftmax
from alibi_lab.lab.model.attention import LayerCache, attend
from alibi_lab.lab.model.method_checks import Hooks, made
from alibi_lab.lab.model.position_method import Bias, Context, LayerInput, Pass, PositionMethod
from alibi_lab.lab.model.positions import check_segments, check_stretch, method_class

_LOGITS_AT_ONCE = 1 << 20  # 4 MiB of fp32, which fit into the caches of a core and are reused by malloc


class LanguageModel(nn.Module):
    """Maps tokens [B, T] to the logits of the next tokens [B, T, V] or, with `targets`, to their losses.

    The initial weights depend only on the seed and on each parameter's name and shape, so models of one seed that differ in
    their position method start from the same weights.

    Args:
        trained_length: L, in tokens; beyond it, learned positions end and stretches begin.

    The training sets two attributes: `progress` is the finished share of its steps, for methods that change during training,
    and 1 otherwise; with `activation_checkpointing`, a training keeps only the activations between blocks and recomputes the
    others. `checks_values` refuses NaN and infinite numbers from hooks (`method_trial.py`).
    """

    progress, activation_checkpointing, checks_values = 1.0, False, False

    def __init__(self, config: ModelConfig, *, trained_length: int, seed: int = 0) -> None:
        super().__init__()
        self.config, self.trained_length = config, trained_length
        self.position = made(method_class(config.method), config, trained_length)
        self.embedding: nn.Embedding | AdaptiveInput
        if config.cutoffs:
            self.embedding = AdaptiveInput(config.vocab_size, config.embed_dim, config.cutoffs)
            self.softmax = AdaptiveSoftmax(config.embed_dim, config.cutoffs, dropout=config.softmax_dropout)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.dropout = _dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        ends_with_norm = config.architecture != "baevski-auli"
        self.norm = _norm(config.architecture, config.embed_dim) if ends_with_norm else nn.Identity()
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
    ) -> Tensor:
        """Logits [B, T, V], or the losses [B, N] of the targets.

        Args:
            targets: [B, N], N ≤ T: the tokens that follow the last N inputs. Returns −ln p of each in nats, fp32, without
                computing the logits of the other inputs or, with an adaptive softmax, of the whole vocabulary.
            caches: one per layer; the tokens follow those in the caches.
            window: the number of tokens that each token sees in every layer, itself included. Positions do not change.
            segment_ids: [B, S], integers: the documents of all tokens, cached ones first. Attention stays within a document.
                Distances are those of the row, so methods that are not relative raise an error.
            context: other processes hold the other tokens of the sequences; not with caches.

        Raises:
            ConfigError: the position method does not support the arguments.
            PositionError: learned positions beyond the trained length.
        """
        if segment_ids is not None:
            check_segments(self.config.method)
        length, segment = tokens.shape[1], self.position.segment
        at = Pass(length, length, self.progress, window=window, segment_ids=segment_ids, context=context)
        if segment is None:
            x = self._hidden(tokens, at, caches)
        elif caches is None and segment_ids is None and context is None:
            x = self._hidden_in_segments(tokens, at, segment)
        else:
            raise ConfigError(
                f"model.method is {self.config.method!r}, which reads texts in segments of {segment} tokens; it "
                "does not support caches (generating, eval.memory, eval.sinks), data.segments or train.context_parallel"
            )
        if targets is None:
            return self._logits(self.norm(x))
        losses = self._losses(self.norm(x[:, length - targets.shape[1] :]), targets)
        return losses.clone()  # not a view, because FSDP hooks its backward to it

    def _hidden(self, tokens: Tensor, at: Pass, caches: Sequence[LayerCache] | None) -> Tensor:
        """The output of the last block, [B, T, E]; the lengths of `at` are set here."""
        past = len(caches[0]) if caches else 0
        total = past + tokens.shape[1]
        room = caches[0].keys.max_tokens if caches else None  # a full stream drops as many tokens as it receives
        start = at.context.start if at.context else caches[0].dropped if caches else 0
        positions = torch.arange(past + start, total + start, device=tokens.device)
        x = self.embedding(tokens)
        if self.config.architecture != "mpt":
            x = x * math.sqrt(self.config.embed_dim)
        hooks = Hooks(self.position, self.checks_values)
        x = self.dropout(hooks.add(x, positions))
        at = dataclasses.replace(at, query_len=tokens.shape[1], key_len=min(total, room or total))
        shared = None if self.position.per_layer else hooks.bias(at, x)
        for layer, block in enumerate(self.blocks):
            if self.activation_checkpointing and self.training and torch.is_grad_enabled() and not caches:
                x = checkpoint(block, x, hooks, positions, at, shared, None, use_reentrant=False)
            else:
                x = block(x, hooks, positions, at, shared, caches[layer] if caches else None)
        return x

    def _hidden_in_segments(self, tokens: Tensor, at: Pass, segment: int) -> Tensor:
        """Like `_hidden`, segment by segment; each sees the memory of the method (Dai et al. 2019, arXiv:1901.02860)."""
        caches, hidden = [LayerCache() for _ in self.blocks], []
        for part in tokens.split(segment, dim=1):
            hidden.append(self._hidden(part, at, caches))
            caches = [cache.last(self.position.memory) for cache in caches]
        return torch.cat(hidden, dim=1)

    def stretched(self, stretch: Stretch, length: int) -> "LanguageModel":
        """A model for texts of `length` tokens with the same weights and stretched positions.

        Returns this model up to the trained length, or if the stretch is "none". This model does not change; learned slopes are
        stretched from their current values. Evaluation calls it once per length.

        Raises:
            ConfigError: the method does not support this stretch.
        """
        check_stretch(self.config.method, stretch)
        if stretch == "none" or length <= self.trained_length:
            return self
        position = Hooks(self.position, self.checks_values).stretched(stretch, length)
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
        # On a CPU a few rows at a time, so that they stay in the cache between the product and the loss; the bits are equal.
        rows = max(1, _LOGITS_AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        parts = zip(logits.split(rows), targets.flatten().split(rows), strict=True)
        losses = [F.cross_entropy(some.float(), after, reduction="none") for some, after in parts]
        return torch.cat(losses).view(targets.shape)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); x [B, T, E]."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        width, hidden, bias = config.embed_dim, config.ffn_dim, config.architecture == "baevski-auli"
        self.num_heads, self.attention_dropout = config.num_heads, config.attention_dropout
        self.activation = _ACTIVATIONS[config.architecture]
        self.attention_norm = _norm(config.architecture, width)
        self.q = Linear(width, width, bias=bias)
        self.k = Linear(width, width, bias=bias)
        self.v = Linear(width, width, bias=bias)
        self.attention_out = Linear(width, width, bias=bias)
        self.ffn_norm = _norm(config.architecture, width)
        self.ffn_gate = Linear(width, hidden, bias=False) if config.architecture == "modern" else None
        self.ffn_in = Linear(width, hidden, bias=bias)
        self.ffn_out = Linear(hidden, width, bias=bias)
        self.dropout, self.activation_dropout = _dropout(config.dropout), _dropout(config.activation_dropout)

    def forward(
        self, x: Tensor, hooks: Hooks, positions: Tensor, at: Pass, shared: Bias, cache: LayerCache | None
    ) -> Tensor:
        """The output, [B, T, E]; `shared` is the bias of all layers, unless the method is `per_layer`."""
        y = self.attention_norm(x)
        q, k, v = (part(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        inputs = LayerInput(y, self.index, None if cache is None else cache.key_bias, self)
        at = dataclasses.replace(at, input=inputs)
        q, k = hooks.rotate(q, k, positions, at)
        bias = hooks.bias(at, y) if hooks.method.per_layer else shared
        if cache is not None:
            k, v, bias = cache.append(k, v, bias, layer=self)
        if at.context is not None and type(hooks.method).attend is not PositionMethod.attend:
            raise ConfigError(
                "the position method has its own attention, which train.context_parallel does not support"
            )
        dropout_p = self.attention_dropout if self.training else 0.0
        default = functools.partial(attend, bias=bias, at=at, dropout_p=dropout_p)
        y = hooks.attend(q, k, v, at, default)
        x = x + self.dropout(self.attention_out(y.transpose(1, 2).flatten(-2)))
        y = self.ffn_norm(x)
        if self.ffn_gate is None:
            y = self.activation(self.ffn_in(y))
        else:
            y = self.activation(self.ffn_gate(y)) * self.ffn_in(y)
        added: Tensor = self.dropout(self.ffn_out(self.activation_dropout(y)))
        return x + added


def decoder_state(model: LanguageModel) -> dict[str, Tensor]:
    """The weights under the names that `hf.export.export_mpt` reads; the embeddings are not scaled.

    Raises:
        ConfigError: the architecture or the positions differ from MPT's.
    """
    config = model.config
    if config.architecture != "mpt" or config.method != "alibi":
        raise ConfigError(
            f'the model has model.architecture {config.architecture!r} and model.method {config.method!r}, but an MPT is "mpt" '
            'and "alibi"; train one with --set model.architecture=mpt --set model.method=alibi'
        )
    names = {"attention_out": "attention.out_proj", "ffn_in": "ffn.0", "ffn_out": "ffn.3"}
    names |= {part: f"attention.{part}_proj" for part in ("q", "k", "v")}
    state = model.state_dict()
    return {".".join(names.get(part, part) for part in name.split(".")): tensor for name, tensor in state.items()}


_ACTIVATIONS: dict[Architecture, Callable[[Tensor], Tensor]] = {"modern": F.silu, "mpt": F.gelu, "baevski-auli": F.relu}


def _norm(architecture: Architecture, width: int) -> nn.Module:
    return nn.RMSNorm(width) if architecture == "modern" else nn.LayerNorm(width, bias=architecture == "baevski-auli")


def _dropout(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()


@torch.no_grad()
def _initialize(model: LanguageModel, seed: int) -> None:
    """Sets norms to 1 and biases to 0, and keeps the vectors of the position method. Matrices:

    Normal with deviation 1/√(inputs); projections into the residual stream are smaller by 1/√(2·layers) (GPT-2). For
    "baevski-auli" Glorot's uniform range, times 1/√2 for q, k and v, as in fairseq; its tables are normal too.
    """
    tables = ("embedding.weight", "embedding.tables.", "position.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if parameter.ndim < 2:
            if not name.startswith("position."):
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif model.config.architecture == "baevski-auli" and not name.startswith(tables):
            gain = math.sqrt(0.5) if name.endswith((".q.weight", ".k.weight", ".v.weight")) else 1.0
            nn.init.xavier_uniform_(parameter, gain=gain, generator=generator)
        else:
            last = math.sqrt(2 * model.config.num_layers) if name.endswith("_out.weight") else 1.0
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator).div_(last)
