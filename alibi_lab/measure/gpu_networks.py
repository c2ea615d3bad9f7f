"""A whole model on one GPU: a BLOOM before and after `patch`, and a decoding step of it through a CUDA graph."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alibi_lab.measure.gpu_parts import GRAPH, Calls, Case, Part, cases, checked_row, number_type
from alibi_lab.measure.gpu_truth import relative_error
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import replayable

LAST = 64  # positions whose logits are compared
TRANSFORMERS = ("alibi_lab.measure.embedding_peers", "transformers.models.bloom.modeling_bloom")
ROOM = 1024  # tokens that a static cache holds beyond the prompt
LAYERS, WORDS = {"cpu": 1, "cuda": 8}, {"cpu": 100, "cuda": 32768}
ORIGINAL, STATIC = "original", "ours, static cache"


def bloom_pass(case: Case, device: torch.device) -> Calls:
    """A forward pass, compared with that of the original in fp32."""
    exact, original, patched = _blooms(case.heads, case.head_dim, device)
    tokens = _tokens(case, device)
    true = _logits(exact, tokens)
    plain = relative_error(_logits(original, tokens), true)
    return {
        name: functools.partial(checked_row, functools.partial(_logits, model, tokens), device, true, plain)
        for name, model in ((ORIGINAL, original), ("ours", patched))
    }


def bloom_step(case: Case, device: torch.device) -> Calls:
    """The step after a prompt of `case.length` tokens."""
    from transformers import DynamicCache

    from alibi_attn.hf import ALiBiCache, StaticALiBiCache

    exact, original, patched = _blooms(case.heads, case.head_dim, device)
    tokens = _tokens(case._replace(length=case.length + 1), device)
    true = _logits(exact, tokens)[:, -1:]
    plain = relative_error(_logits(original, tokens)[:, -1:], true)

    def row(model: nn.Module, new_cache: Callable[[], Any], *, graph: bool = False) -> Row:
        cache = new_cache()
        step: Callable[[], Tensor] = functools.partial(_logits, model, tokens[:, -1:], cache)
        if graph:
            step()
            step = replayable(step, device)
            cache.reset()
        _logits(model, tokens[:, :-1], cache)
        return checked_row(step, device, true, plain)

    static = functools.partial(StaticALiBiCache, case.length + ROOM)
    return {
        "ours": functools.partial(row, patched, ALiBiCache),
        STATIC: functools.partial(row, patched, static),
        STATIC + GRAPH: functools.partial(row, patched, static, graph=True),
        ORIGINAL: functools.partial(row, original, DynamicCache),
    }


@functools.lru_cache(maxsize=1)  # both parts have the same sizes
def _blooms(heads: int, head_dim: int, device: torch.device) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A BLOOM with random weights: (in fp32, as it is, patched), the last two in the dtype of the device."""
    from transformers import BloomConfig, BloomForCausalLM

    from alibi_attn.hf import patch

    words, layers = WORDS[device.type], LAYERS[device.type]
    config = BloomConfig(vocab_size=words, hidden_size=heads * head_dim, n_layer=layers, n_head=heads)
    torch.manual_seed(0)
    with device:
        original: nn.Module = BloomForCausalLM(config)
    original = original.to(number_type(device)).eval()
    patched = copy.deepcopy(original)
    patch(patched)
    return copy.deepcopy(original).float(), original, patched


def _tokens(case: Case, device: torch.device) -> Tensor:
    """A text [B, T]."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(3, WORDS[device.type], (case.batch, case.length), generator=generator, device=device)


def _logits(model: nn.Module, tokens: Tensor, cache: object = None) -> Tensor:
    """The last logits, at most LAST."""
    return model(tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=LAST).logits


NOTES = {ORIGINAL: "transformers' BloomForCausalLM, eager attention", "ours": "the same, patched"}
STEP_NOTES = {
    "ours": "patched, ALiBiCache",
    STATIC: "patched, StaticALiBiCache",
    STATIC + GRAPH: "the same, replayed by a CUDA graph",
    ORIGINAL: "transformers' BloomForCausalLM, DynamicCache",
}
BLOOM = Part("bloom", 15.0, NOTES, cases("1x2048x16x128 1x8192x16x128"), bloom_pass, imports=TRANSFORMERS)
BLOOM_STEP = Part("bloom-step", 12.0, STEP_NOTES, cases("1x2048x16x128"), bloom_step, imports=TRANSFORMERS)
