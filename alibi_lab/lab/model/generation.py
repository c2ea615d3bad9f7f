"""Text from a trained language model, token by token."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alibi_lab.lab.model.attention import LayerCache
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import PositionError

LEAST_TEMPERATURE = 1e-6  # logits divided by less would overflow fp32
PREFILL_TOKENS = 2048  # prompt tokens read at a time, so that only the caches grow with the prompt's length


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continues a prompt token by token with cached keys, also beyond the trained length.

    Args:
        temperature: 0 takes the most likely token, 1 samples from the model's distribution.
        top_k: sample only from the k most likely tokens.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a number out of its range.
        PositionError: learned positions and more tokens than the trained length.
    """
    if not prompt or not all(0 <= token < model.config.vocab_size for token in prompt):
        raise ValueError(f"the prompt must have at least one token, each from 0 to {model.config.vocab_size - 1}")
    sampled = temperature == 0 or temperature >= LEAST_TEMPERATURE  # False for NaN
    if max_new_tokens < 1 or not sampled or (top_k is not None and top_k < 1) or not 0 <= seed < 2**63:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, temperature {temperature}, top_k {top_k} and seed {seed}; pass max_new_tokens "
            f"of 1 or more, temperature of 0, or {LEAST_TEMPERATURE} or more, top_k of 1 or more or None, a seed below 2⁶³"
        )
    limit, needed = model.position.max_positions, len(prompt) + max_new_tokens - 1
    if limit is not None and needed > limit:
        raise PositionError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {needed} positions, but "
            f"{model.config.method} positions end at the trained length, {limit}; ask for at most "
            f"{max(limit + 1 - len(prompt), 0)} new tokens, shorten the prompt, or use another method"
        )

    def continuation() -> Iterator[int]:  # begins after the checks above, which do not wait for the first token
        generator, caches = torch.Generator().manual_seed(seed), [LayerCache() for _ in model.blocks]
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                for chunk in torch.tensor([tokens], device=model.device).split(PREFILL_TOKENS, dim=1):
                    logits = model(chunk, caches=caches)[0, -1].float().cpu()
            tokens = [_sample(logits, temperature, top_k, generator)]
            yield tokens[0]

    return continuation()


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
