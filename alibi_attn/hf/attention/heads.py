"""The heads around a patched model: their forward passes hand the arguments that tell texts in one row apart to the model inside.

transformers' heads pass such arguments to the loss only, or nowhere. Read next: `packed_rows.py`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from alibi_attn.hf.attention import packed_rows
from alibi_attn.hf.attention.packed_rows import PackedMask
from alibi_attn.hf.caches.cache import ALiBiCache


def around(model: nn.Module, body: nn.Module) -> Iterator[PreTrainedModel]:
    """The models of transformers that contain this one."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not body and body in module.modules():
            yield module


def packing_forward(head: PreTrainedModel, before: Callable[..., object] | None) -> Callable[..., object]:
    """The forward of a patched head, with the signature of the original, `segment_ids`, `prefix_len` and `positions`."""
    own = type(head).forward
    signature = inspect.signature(own)
    names = tuple(name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD)[1:]
    is_open = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
    forward = functools.partial(_forward, head, before, None if is_open else names)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
        for name in ("segment_ids", *packed_rows.OF_ROWS)
    ]
    others = list(signature.parameters.values())
    at = len(others) - (others[-1].kind is inspect.Parameter.VAR_KEYWORD)
    functools.update_wrapper(forward, own, assigned=())
    vars(forward)["__signature__"] = signature.replace(parameters=[*others[:at], *extra, *others[at:]])
    return forward


def _forward(
    head: PreTrainedModel,
    before: Callable[..., object] | None,
    names: tuple[str, ...] | None,
    *args: object,
    **kwargs: object,
) -> object:
    """The head's forward, with packing arguments in its mask; names: its arguments, None = a wrapper takes any, unchecked."""
    given: dict[str, Any] = {**dict(zip(names or (), args, strict=False)), **kwargs}
    args = args if names is None else ()
    kind = type(head).__name__
    known = tuple(name for name in given if name not in packed_rows.NAMES) if names is None else names
    packing = packed_rows.split(given, known=known, where=kind)
    if packing:
        of_texts = packing.keys() - set(packed_rows.OF_ROWS)
        if of_texts and kind.endswith("ForSequenceClassification"):
            raise ValueError(
                f"{kind} got {', '.join(sorted(of_texts))}, but it has one result per row, that of its last token; "
                "pass one text per row"
            )
        given["attention_mask"] = PackedMask(given.get("attention_mask"), packing)
    return type(head).forward(head, *args, **given) if before is None else before(*args, **given)


def checked_generate(
    head: GenerationMixin, before: Callable[..., object] | None, *args: object, **kwargs: object
) -> object:
    """The `generate` of a patched head: an `ALiBiCache` of another text is refused, where it would continue that text."""
    check_cache(*args, **kwargs)
    own: Callable[..., object] = type(head).generate
    return own(head, *args, **kwargs) if before is None else before(*args, **kwargs)


def check_cache(inputs: object = None, *_: object, **options: object) -> None:
    """Raises ValueError if an `ALiBiCache` among the arguments of `generate` holds another text than its token ids."""
    cache, tokens = options.get("past_key_values"), options.get("input_ids", inputs)
    if not isinstance(cache, ALiBiCache) or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return
    if (known := cache.tokens()) is None:
        return
    held, length = known.shape[1], tokens.shape[1]
    if known.shape[0] != tokens.shape[0] or not torch.equal(known[:, :length], tokens[:, :held].cpu().long()):
        raise ValueError(f"the cache holds {held} tokens of another text; use a new ALiBiCache()")
    if held >= length:
        raise ValueError(
            f"the cache holds {held} tokens but the text has {length}; call cache.crop({length - 1 - held})"
        )
