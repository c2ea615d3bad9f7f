"""`patch`: changes a loaded BLOOM, MPT, Falcon-RW or T5 in place so that its attention runs through our kernels.

Only the given instance changes, and its config does not. Its attention layers get a new `forward`. So does the model
around them: it passes our mask to the layers, and raises an error for outputs that a patched model cannot return.
`undo` reverts all of it. The replacements are module-level functions with bound arguments, so copies and pickles of a
patched model stay patched.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from alibi_attn.attention.run.dispatch import check_name
from alibi_attn.hf.attention import cached_pass, heads, masks
from alibi_attn.hf.attention.patched_attention import Numerics
from alibi_attn.hf.caches.cache import ALiBiCache
from alibi_attn.hf.patching import decoding_step, unsupported
from alibi_attn.hf.readers.families import PATCHED
from alibi_attn.hf.readers.families.family import PatchedFamily
from alibi_attn.nn.linear import fastest, quantized
from alibi_attn.nn.replacement import Replacement, forward_of, is_hooked, replaced, restore


@dataclasses.dataclass(eq=False, repr=False)
class Patch:
    """A handle on the changes to one model. As a context manager it undoes the patch at the end of the block.

    A copied or unpickled model stays patched. To undo the copy, copy or pickle the handle together with the model:
    `copy.deepcopy((model, handle))`.

    Attributes:
        layers: names of the patched attention layers.
        linears: names of the linear layers that `nn/linear/fastest.py` computes; none with numerics="checkpoint".
        activations: names of the activations that run in one pass instead of several; none with numerics="checkpoint".
    """

    layers: tuple[str, ...]
    _changes: list[Replacement]
    linears: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    _quantized: quantized.Kind | None = None

    def undo(self) -> None:
        """Restore the model's original attention, bit for bit, below hooks that accelerate added since.

        Raises:
            ValueError: the patch has already been undone, or has quantized linear layers; or another tool has wrapped or replaced
                a forward since. Then nothing changes.
        """
        if self._quantized:
            raise ValueError(f'linears="{self._quantized}" has freed the original weights; load the model again')
        if not self._changes:
            raise ValueError("this patch has already been undone; call patch(model) for a new one")
        for change in self._changes:
            if "attend" in vars(change.module):
                raise ValueError(
                    f"the attention of {change.label} has been replaced since (by context_parallel or "
                    "record_attention); undo that first"
                )
        restore(self._changes, "patch(model)")
        self._changes.clear()

    def __enter__(self) -> Self:
        if self._quantized:
            raise ValueError(
                f'linears="{self._quantized}" cannot be undone at the end of a with block; call patch(model, ...) without one'
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._changes:
            self.undo()

    def __repr__(self) -> str:
        return (
            f"Patch(layers={len(self.layers)}, linears={len(self.linears)}, activations={len(self.activations)}, "
            f"active={bool(self._changes)})"
        )


def patch(
    model: nn.Module, backend: str = "auto", *, numerics: Numerics = "exact", linears: quantized.Kind | None = None
) -> Patch:
    """Make an ALiBi model of transformers compute its attention with `alibi_attention`, in place.

        softmax(q·kᵀ/√D − m·(i − j))·v  in place of the model's  softmax(q·kᵀ/√D + m·j)·v, which is equal for j ≤ i

    No n×n scores or masks are built any more. On a CPU the linear layers use the fastest kernel for the processor
    (`alibi_attn/nn/linear/fastest.py`), and BLOOM's GELU makes one pass over memory instead of five.

    Padding on either side, every mode of `generate`, dynamic and static caches, gradients and `torch.compile` work. Weights,
    config, caches and saved files do not change, and `type(model)(model.config)` is an unpatched model. As before, logits at
    padding positions and of rows that are all padding are meaningless (no key is visible there, so attention is 0).

    Use it for BLOOM, MPT and Falcon-RW, and for T5 (also FLAN), mT5 and UMT5, whose bucketed bias becomes a table by distance
    (`toeplitz_attention`). `ALiBiForCausalLM` loads decoders that transformers cannot load, `ALiBiBertModel`
    encoders.

    A common mistake: generating with the default cache, which copies every key for every token; pass
    `past_key_values=ALiBiCache()`. In bf16 logits differ from the unpatched model's, whose biases are rounded:
    `numerics="checkpoint"` reproduces them.

    Args:
        model: a loaded BLOOM, MPT, Falcon with alibi=True, or T5, or a module that contains one; it is changed in place.
        backend: of `alibi_attention`; for T5 one that supports tables.
        numerics: "exact" computes distances in fp32 in every dtype of the model. "checkpoint" (not T5) changes nothing but
            attention, and rounds biases as in training (BLOOM's m·j in its dtype, Falcon's bf16 product), a few rows of scores at
            a time: linear memory, quadratic time.
        linears: "int8", or "float8" on a GPU, converts the linear layers, except the output's, for inference
            (`nn/linear/quantized.py`). Their original weights are freed, so this cannot be undone.

    Returns:
        A handle with the names of the replaced modules (`.layers`, `.linears`, `.activations`) and `.undo()`; also a context
        manager.

    Raises:
        ValueError: the model has no supported layers, is patched already, has a config that transformers builds incorrectly, uses
            remote code, or was loaded without its ALiBi; the message explains what to load instead.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50))
    >>> with patch(model) as handle:
    ...     print(handle.layers)
    ('transformer.h.0.self_attention',)

    Source: `docs/hf.md`; Press et al. 2022, sec. 3 (arXiv:2108.12409).
    """
    return patched_as(model, PATCHED, backend=backend, numerics=numerics, linears=linears)


def patched_as(
    model: nn.Module,
    families: Sequence[PatchedFamily],
    *,
    backend: str,
    numerics: Numerics,
    linears: quantized.Kind | None = None,
) -> Patch:
    """`patch` with a given table of families."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__} but must be a loaded model, an nn.Module: "
            "what AutoModelForCausalLM.from_pretrained(...) returns"
        )
    check_name(backend)
    if numerics not in ("exact", "checkpoint"):
        raise ValueError(f'numerics is {numerics!r} but must be "exact" or "checkpoint"')
    if linears not in (None, "int8", "float8"):
        raise ValueError(f'linears is {linears!r} but must be "int8", "float8" or None')
    if linears and numerics != "exact":
        raise ValueError(
            f'linears="{linears}" rounds weights, but numerics="checkpoint" reproduces the model\'s own numbers; omit one'
        )
    if (reason := unsupported.why_not(model)) is not None:
        raise ValueError(reason)
    supported = ", ".join(family.name for family in families)
    bodies = [
        (name, module, family)
        for name, module in model.named_modules()
        for family in families
        if isinstance(module, family.model)
    ]
    if not bodies:
        raise ValueError(
            unsupported.needs_none(model)
            or f"{type(model).__name__} has nothing to patch; supported are the whole models of {supported}. "
            f"{unsupported.readable()}; models with other position methods have no ALiBi biases"
        )
    of_bodies = []
    for prefix, body, family in bodies:
        name = f"{prefix or 'the model'} ({type(body).__name__})"
        reason = None if family.why_not is None else family.why_not(body.config)
        if linears and family.around is not None and body.dtype == torch.float16:
            reason = (
                f'in float16 {family.name} keeps some layers in float32, but linears="{linears}" does not; use bfloat16'
            )
        if reason:
            raise ValueError(f"{name} cannot be patched: {reason}; supported are {supported}")
        _check_layers(name, body, family)
        of_bodies.append(family.settings(body.config, backend=backend, numerics=numerics))
    # First, because weights that are not finite raise an error, and no handle could undo the other changes.
    converted = [
        f"{prefix}.{name}" if prefix else name
        for prefix, body, family in bodies
        if linears
        for name in quantized.convert(body, family.linears, kind=linears)
    ]
    changes: list[Replacement] = []
    names = {id(module): name for name, module in model.named_modules()}

    def change(module: nn.Module, name: str, value: object) -> None:
        changes.append(replaced(module, names[id(module)], name, value))

    layers: list[str] = []
    around: dict[str, list[str]] = {"linears": [], "activations": []}
    for (prefix, body, family), settings in zip(bodies, of_bodies, strict=True):
        for name, layer in _layers(body, family, prefix):
            change(layer, family.mark, settings)
            change(layer, forward_of(layer), functools.partial(family.forward, layer))
            layers.append(name)
        # With numerics="checkpoint" the bias is built by the model itself, also for masks with holes.
        mask = masks.COUNTED if family.counts_positions and numerics == "exact" else masks.INDEXED
        around_body = family.around or functools.partial(_forward, _mask=mask, _family=family)
        names_of_body = tuple(inspect.signature(type(body).forward).parameters)[1:]
        whole_pass = functools.partial(around_body, body, vars(body).get(forward_of(body)), names_of_body)
        change(body, forward_of(body), functools.update_wrapper(whole_pass, type(body).forward, assigned=()))
        for whole in heads.around(model, body) if family.around is None else ():
            change(whole, forward_of(whole), heads.packing_forward(whole, vars(whole).get(forward_of(whole))))
        for name, value in family.unused.items():
            change(body, name, value)
        for head in model.modules():
            if isinstance(head, GenerationMixin) and body in head.modules():
                change(head, "create_masks_for_generate", masks.padded)
                if family.around is None:
                    before = vars(head).get("generate")
                    change(head, "generate", functools.partial(heads.checked_generate, head, before))
        if numerics == "exact":
            for kind, name, module, forward in _around(model, body, family):
                change(module, forward_of(module), functools.partial(forward, module))
                around[kind].append(name)
    return Patch(
        tuple(layers),
        changes,
        linears=tuple(converted if linears else around["linears"]),
        activations=tuple(around["activations"]),
        _quantized=linears,
    )


def _around(
    model: nn.Module, body: nn.Module, family: PatchedFamily
) -> Iterator[tuple[str, str, nn.Module, Callable[..., Tensor]]]:
    """(kind, name, module, its faster forward) of the layers around attention, including the model's head.

    Layers of another class, or whose forward was replaced (quantized, with adapters), are not changed.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    heads = [module.get_output_embeddings() for module in models]  # type: ignore[no-untyped-call]
    inside = {id(module) for module in (*body.modules(), *heads)}
    for name, module in model.named_modules():
        if id(module) not in inside or ("forward" in vars(module) and not is_hooked(module)):
            continue
        if type(module) in family.linears:
            yield "linears", name, module, fastest.forward
        elif type(module) in family.activations:
            yield "activations", name, module, family.activations[type(module)]


def _layers(body: nn.Module, family: PatchedFamily, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, attention layer)"""
    yield from ((name, x) for name, x in body.named_modules(prefix=prefix) if isinstance(x, family.layer))


def _check_layers(name: str, body: PreTrainedModel, family: PatchedFamily) -> None:
    layers = dict(_layers(body, family))
    if any(family.mark in vars(layer) for layer in layers.values()):
        raise ValueError(f"{name} is patched already; call undo() on that patch first")
    for at, layer in layers.items():
        if type(layer) is not family.layer or ("forward" in vars(layer) and not is_hooked(layer)):
            raise ValueError(
                f"{name} has a {type(layer).__name__} at {at} whose forward was already replaced; patch the model as it was "
                "loaded, without flash attention"
            )


def _forward(
    body: PreTrainedModel,
    before: Callable[..., object] | None,
    names: tuple[str, ...],
    *args: object,
    _mask: str,
    _family: PatchedFamily,
    **kwargs: object,
) -> object:
    """Replaces the forward of a model without head: refuses what it cannot return, then runs it with our mask."""
    given, packing, tokens = cached_pass.arguments(body, names, args, kwargs)
    run = functools.partial(type(body).forward, body) if before is None else before
    if given.get("position_ids") is not None:  # Falcon has this argument
        packing["position_ids"] = given["position_ids"]
    if tokens is None:
        return run(**given)
    cache = given.get("past_key_values")
    with cached_pass.whole(body, cache, use_cache=given.get("use_cache"), new=tokens.shape[1]):
        if isinstance(cache, ALiBiCache):
            cache.begin(body, given.get("input_ids"))
            alone = tokens.shape[1] == 1 and packing.keys() <= {"prefix_len"}  # a prefix is no news to a single token
            one_text = before is None and (alone or not packing)
            if one_text and (hidden := decoding_step.step(body, _family, given)) is not None:
                wanted = given.get("return_dict")
                as_dict = body.config.return_dict if wanted is None else wanted
                output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden, past_key_values=cache)
                return output if as_dict else (hidden, cache)
        mask = given.get("attention_mask")
        given["attention_mask"] = masks.of_layers(_mask, body.config, tokens, mask, cache, packing)
        return run(**given)
