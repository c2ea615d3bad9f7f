"""Gradient checkpointing and caches: transformers drops the cache of each layer that checkpoints, and such a token would see only
itself. Without gradients nothing is checkpointed, and the cache is used; with them a cache is refused."""

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiCache

FAMILIES = ("bloom", "mpt", "falcon", "ours")


@pytest.fixture
def checkpointed(build_patched):
    """A model that trains with gradient checkpointing."""

    def builder(family, **options):
        model = build_patched(family, **options)
        checkpoint_activations(model)
        return model.train()

    return builder


def assert_checkpoints(model):
    """Activation checkpointing is on in every layer, as it was before."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert [layer.gradient_checkpointing for layer in layers] == [True] * 2


@pytest.mark.parametrize("cache", [None, DynamicCache, ALiBiCache])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cached_token_sees_all_tokens_before_it(family, cache, checkpointed, tokens):
    model, ids = checkpointed(family), tokens(2, 20)
    expected = model.eval()(ids, use_cache=False).logits[:, -1]
    model.train()
    held = model(ids[:, :19], past_key_values=cache() if cache else None, use_cache=True).past_key_values
    assert held.get_seq_length() == 19
    actual = model(ids[:, 19:], past_key_values=held, use_cache=True).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert held.get_seq_length() == 20
    assert_checkpoints(model)


@pytest.mark.parametrize("numerics", ["exact", "checkpoint"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_is_masked_while_checkpointing_is_on(family, numerics, checkpointed, tokens):
    model, ids = checkpointed(family, numerics=numerics), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model.eval().generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    actual = model.train().generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_refused_while_gradients_are_checkpointed(family, checkpointed, tokens):
    model, ids = checkpointed(family), tokens(2, 9)
    cache = ALiBiCache()
    for given in ({"past_key_values": cache}, {"use_cache": True}):
        with pytest.raises(ValueError, match=r"gradient checkpointing drops the cache.*torch\.no_grad\(\)"):
            model(ids, **given)
    assert cache.get_seq_length() == 0
    assert_checkpoints(model)
    output = model(ids, labels=ids)
    assert output.past_key_values is None
    output.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layer_that_loses_its_cache_is_noticed(family, checkpointed, tokens, monkeypatch):
    """As it was while checkpointing was on, with and without padding."""
    model, ids = checkpointed(family).eval(), tokens(2, 9)
    block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    forward = type(block).forward

    def without(self, *args, **kwargs):
        lost = dict.fromkeys(kwargs.keys() & {"layer_past", "past_key_values"})
        return forward(self, *args, **{**kwargs, **lost})

    cache = model(ids, use_cache=True).past_key_values
    with monkeypatch.context() as changed:
        changed.setattr(type(block), "forward", without)
        with pytest.raises(ValueError, match="had 9 tokens and has 9 after 1 new ones"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        mask = torch.ones(2, 10)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="mask of 10 keys but has 1"):
            model(ids[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
