"""Undoing a patch after other tools have wrapped the same modules: below accelerate's hooks; else it is refused, unchanged."""

import functools

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import convert_outputs_to_fp32

from alibi_attn.hf import patch
from alibi_attn.hf.patching.capture_qk import watched

pytestmark = pytest.mark.usefixtures("no_gradients")
FAMILIES = ("bloom", "mpt", "falcon")


def attributes(model):
    """The own attributes of every module, by identity."""
    return {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}


def layer_of(model):
    return next(module for module in model.modules() if "alibi_settings" in vars(module))


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_accelerate_offloads_still_reach_an_unpatched_model(family, build, tokens):
    model, ids = build(family), tokens(2, 12)
    expected = model(ids).logits
    handle = patch(model)
    patched = model(ids).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(ids).logits, patched)
    handle.undo()
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_added_after_the_patch_stay_and_can_be_removed(family, build, tokens):
    model, ids, hook = build(family), tokens(2, 12), Counting()
    expected, before = model(ids).logits, attributes(model)
    handle = patch(model)
    wrapped = [model.transformer, layer_of(model), model.lm_head]
    for module in wrapped:
        add_hook_to_module(module, hook)
    handle.undo()
    assert torch.equal(model(ids).logits, expected)
    assert hook.calls == 3
    for module in wrapped:
        remove_hook_from_module(module)
        del vars(module)["forward"]  # accelerate leaves the bound method
    assert attributes(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_added_before_the_patch_work_and_leave_nothing_once_they_are_removed(family, build, tokens):
    model, ids, hook = build(family), tokens(2, 12), Counting()
    expected, before = model(ids).logits, attributes(model)
    for module in list(model.modules()):
        if "Attention" in type(module).__name__ or module in (model, model.transformer):
            add_hook_to_module(module, hook)
    handle = patch(model, numerics="checkpoint" if family == "falcon" else "exact")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert hook.calls == 4
    remove_hook_from_module(model, recurse=True)
    handle.undo()
    assert torch.equal(model(ids).logits, expected)
    assert attributes(model) == before


def autocast(forward):
    return convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(forward))


def own(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [autocast, own, functools.partial])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_wrapper_is_named_and_nothing_changes(family, wrapper, build, tokens):
    model, ids = build(family), tokens(2, 12)
    expected, before = model(ids).logits, attributes(model)
    handle = patch(model)
    for module in (model.transformer, layer_of(model), model.lm_head):
        ours = module.forward
        module.forward = wrapper(ours)
        wrapped, output = attributes(model), model(ids).logits
        name = next(name for name, one in model.named_modules() if one is module)
        with pytest.raises(ValueError, match=rf"^{name} \({type(module).__name__}\) has another forward"):
            handle.undo()
        assert attributes(model) == wrapped
        assert torch.equal(model(ids).logits, output)
        module.forward = ours
    handle.undo()
    assert torch.equal(model(ids).logits, expected)
    assert attributes(model) == before


def test_an_attribute_that_was_set_again_is_named(build):
    model = build("falcon")
    handle = patch(model)
    model.transformer.use_alibi = True
    with pytest.raises(ValueError, match=r"^transformer \(FalconModel\) has another use_alibi"):
        handle.undo()
    assert "active=True" in repr(handle)


def test_a_patch_is_not_undone_under_a_replaced_attention(build, tokens):
    """Without the patch, a context-parallel model would attend to its own rows only."""
    model, seen = build("bloom"), []
    handle = patch(model)
    with (
        watched(model, lambda *given: seen.append(given)),
        pytest.raises(ValueError, match=r"or record_attention\); undo that first"),
    ):
        handle.undo()
    layer = layer_of(model)
    with pytest.raises(ValueError, match="has another attend"), watched(model, lambda *_: None):
        layer.attend = own(layer.attend)
    assert "attend" in vars(layer)
