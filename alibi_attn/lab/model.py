"""The language model: a pre-norm decoder that knows nothing about positions but the three hooks of `positions.py`.

RMS norm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), no biases, embeddings scaled by √E and shared with the output
(Vaswani et al. 2017, sec. 3.4). E is the width, V the vocabulary; other letters as in `attention/spec.py`. Read next: `train.py`.
"""

import math
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alibi_attn.lab.config import ModelConfig
from alibi_attn.lab.positions import PositionError, PositionMethod, attend, position_method
from alibi_attn.nn import KVCache

PREFILL_TOKENS = 2048  # of a prompt that are read at one time, so that only the caches grow with its length


class LanguageModel(nn.Module):
    """Tokens [B, T] in, logits [B, T, V] out; what may follow each token.

    The initial weights depend on the seed and on each parameter's own name and shape only, so that models of one seed
    that differ in their position method start from the same weights.
    """

    def __init__(self, config: ModelConfig, *, trained_length: int, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.position: PositionMethod = position_method(config, trained_length)
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.embed_dim)
        _initialize(self, seed)

    def forward(self, tokens: Tensor, *, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Logits [B, T, V]; with `caches`, one per layer, the tokens follow those that the caches have seen."""
        past = len(caches[0]) if caches else 0
        total = past + tokens.shape[1]
        positions = torch.arange(past, total, device=tokens.device)
        x = self.embedding(tokens) * math.sqrt(self.config.embed_dim)
        x = self.position.add(x, positions)
        bias = self.position.bias(tokens.shape[1], total)
        for layer, block in enumerate(self.blocks):
            x = block(x, self.position, positions, bias, caches[layer] if caches else None)
        return F.linear(self.norm(x), self.embedding.weight)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); x [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(config.embed_dim)
        self.q = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        self.k = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        self.v = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        self.attention_out = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        self.ffn_norm = nn.RMSNorm(config.embed_dim)
        self.ffn_gate = nn.Linear(config.embed_dim, config.ffn_dim, bias=False)
        self.ffn_in = nn.Linear(config.embed_dim, config.ffn_dim, bias=False)
        self.ffn_out = nn.Linear(config.ffn_dim, config.embed_dim, bias=False)

    def forward(
        self, x: Tensor, position: PositionMethod, positions: Tensor, bias: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (part(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = position.rotate(q, k, positions)
        if cache is not None:
            k, v = cache.append(k, v, layer=self)
        x = x + self.attention_out(attend(q, k, v, bias).transpose(1, 2).flatten(-2))
        y = self.ffn_norm(x)
        output: Tensor = self.ffn_out(F.silu(self.ffn_gate(y)) * self.ffn_in(y))
        return x + output


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
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    caches = [KVCache() for _ in model.blocks]
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


@torch.no_grad()
def _initialize(model: LanguageModel, seed: int) -> None:
    """Normal with deviation 1/√(inputs); what adds to the residual stream starts smaller, by 1/√(2·layers) (GPT-2)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # norms
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        if name.endswith("_out.weight"):
            parameter.div_(math.sqrt(2 * model.config.num_layers))
