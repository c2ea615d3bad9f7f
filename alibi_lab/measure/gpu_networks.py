"""Whole models on one GPU: a BLOOM before and after `patch`, a decoding step of it through a CUDA graph, and an encoder."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alibi_lab.measure.gpu_parts import GRAPH, Calls, Case, Part, call_row, judged, number_type
from alibi_lab.measure.gpu_steps import padding
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import replayable

LAST = 64  # positions whose logits are compared
TRANSFORMERS = ("alibi_lab.measure.embedding_peers", "transformers.models.bloom.modeling_bloom")
ROOM = 1024  # tokens that a static cache holds beyond the prompt
LAYERS, WORDS = {"cpu": 1, "cuda": 8}, {"cpu": 100, "cuda": 32768}  # of the BLOOM
ENCODER_LAYERS = {"cpu": 1, "cuda": 12}
ORIGINAL, DENSE, STATIC = "original", "SDPA + dense bias", "ours, static cache"


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


def encoder(case: Case, device: torch.device) -> Calls:
    """A forward pass over texts of several lengths, compared with the dense encoder in fp32, and one without padding."""
    from alibi_lab.measure.embedding_peers import our_encoder
    from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes

    width = case.heads * case.head_dim
    sizes = Sizes(ENCODER_LAYERS[device.type], width, case.heads, 4 * width, 30528 if device.type == "cuda" else 100)
    with device:
        exact = DenseEncoder(sizes, case.length, eager=False).eval()
        ours: nn.Module = our_encoder(sizes)
    exact.take(ours.state_dict())
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(1, sizes.vocabulary, (case.batch, case.length), generator=generator, device=device)
    shown = padding(case, device) if case.batch > 1 else torch.ones_like(ids, dtype=torch.bool)
    mask = shown.long()
    with torch.no_grad():
        true = exact(ids[-1:], mask[-1:])[shown[-1:]]
        dense, whole = exact.to(number_type(device)), ours.to(number_type(device))
        plain = relative_error(dense(ids[-1:], mask[-1:])[shown[-1:]], true)

    def row(call: Callable[[], Tensor], *, graph: bool = False) -> Row:
        run = replayable(call, device) if graph else call
        return checked_row(run, device, true, plain, lambda output: output[-1:][shown[-1:]])

    def of_ours(given: Tensor | None) -> Tensor:
        with torch.no_grad():
            hidden: Tensor = whole(ids, given).last_hidden_state
            return hidden

    def of_dense() -> Tensor:
        with torch.no_grad():
            hidden: Tensor = dense(ids, mask)
            return hidden

    calls: Calls = {
        "ours": functools.partial(row, functools.partial(of_ours, mask)),
        DENSE: functools.partial(row, of_dense),
    }
    if bool(shown.all()):
        calls["ours" + GRAPH] = functools.partial(row, functools.partial(of_ours, None), graph=True)
    return calls


@functools.lru_cache(maxsize=1)  # both parts have the same sizes
def _blooms(heads: int, head_dim: int, device: torch.device) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A BLOOM with random weights: (in fp32, as it is, patched), the last two in the dtype of the device."""
    from transformers import BloomConfig, BloomForCausalLM

    from alibi_attn.hf import patch

    config = BloomConfig(
        vocab_size=WORDS[device.type],
        hidden_size=heads * head_dim,
        n_layer=LAYERS[device.type],
        n_head=heads,
    )
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
    with torch.no_grad():
        logits: Tensor = model(tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=LAST).logits
        return logits


def relative_error(actual: Tensor, true: Tensor) -> float:
    """The largest error as a share of the largest number."""
    return float((actual.detach().float() - true).abs().max() / true.abs().max())


def allowed_error(plain: float, dtype: torch.dtype) -> float:
    """Twice the original's error in this dtype, and four roundings."""
    return 2 * plain + 4 * torch.finfo(dtype).eps


def checked_row(
    call: Callable[[], Tensor],
    device: torch.device,
    true: Tensor,
    plain: float,
    compared: Callable[[Tensor], Tensor] = lambda output: output,
) -> Row:
    """The error of what is compared of the output, and times; twice the original's error is allowed."""
    output = compared(call())
    row = judged(relative_error(output, true), allowed_error(plain, output.dtype))
    return row | call_row(call, device) if row["right"] else row


BLOOM = Part(
    "bloom",
    15.0,
    {ORIGINAL: "transformers' BloomForCausalLM, eager attention", "ours": "the same, patched"},
    {"full": (Case(1, 2048, 16, 128), Case(1, 8192, 16, 128)), "smoke": (Case(1, 70, 2, 16),)},
    bloom_pass,
    imports=TRANSFORMERS,
)
BLOOM_STEP = Part(
    "bloom-step",
    12.0,
    {
        "ours": "patched, ALiBiCache",
        STATIC: "patched, StaticALiBiCache",
        STATIC + GRAPH: "the same, replayed by a CUDA graph",
        ORIGINAL: "transformers' BloomForCausalLM, DynamicCache",
    },
    {"full": (Case(1, 2048, 16, 128),), "smoke": (Case(1, 70, 2, 16),)},
    bloom_step,
    imports=TRANSFORMERS,
)
ENCODER = Part(
    "encoder",
    15.0,
    {
        "ours": "ALiBiBertModel with the mask",
        DENSE: "the same weights, scaled_dot_product_attention with bias and mask as attn_mask",
        "ours" + GRAPH: "ALiBiBertModel without a mask, replayed by a CUDA graph; only where no text is padded",
    },
    {"full": (Case(32, 512, 12, 64), Case(1, 8192, 12, 64)), "smoke": (Case(2, 70, 2, 16), Case(1, 70, 2, 16))},
    encoder,
    imports=TRANSFORMERS,
)
