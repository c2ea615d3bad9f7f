"""A forward pass that ends in the middle, as Ctrl-C does: tokens that only some layers hold are removed before the next."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from alibi_attn.hf import ALiBiCache


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupted(model: nn.Module, layer: nn.Module, ids: torch.Tensor, cache: ALiBiCache) -> None:
    """A pass over more tokens that ends before `layer` appends."""

    def stop(*_: object) -> None:
        raise Interrupted

    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(Interrupted):
        model(ids, past_key_values=cache, use_cache=True)
    hook.remove()


def second_layer(model: nn.Module) -> nn.Module:
    return model.layers[1] if hasattr(model, "layers") else model.transformer.h[1]


@pytest.fixture
def unpatched(build: Callable[..., nn.Module]) -> nn.Module:
    return build("bloom", n_layer=3)


@torch.no_grad()
def test_an_unpatched_model_goes_on_too(unpatched, tokens):
    model, ids, cache = unpatched, tokens(1, 30), ALiBiCache()
    model(ids[:, :20], past_key_values=cache)
    interrupted(model, second_layer(model), ids[:, 20:25], cache)
    assert (cache.get_seq_length(), cache.get_seq_length(0), cache.get_seq_length(1)) == (20, 25, 20)
    torch.testing.assert_close(model(ids[:, 20:], past_key_values=cache).logits, model(ids).logits[:, 20:])


@torch.no_grad()
def test_layers_that_never_got_the_first_tokens_are_noticed(unpatched, tokens):
    """Without `patch` no cache knows how many layers the model has."""
    ids, cache = tokens(1, 30), ALiBiCache()
    interrupted(unpatched, second_layer(unpatched), ids[:, :20], cache)
    with pytest.raises(ValueError, match=r"layer 0 .* holds 30 tokens and layer 1 holds 10"):
        unpatched(ids[:, 20:], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(unpatched(ids, past_key_values=cache).logits, unpatched(ids).logits)


@pytest.mark.parametrize("model", ["bloom", "mpt", "ours"], indirect=True)
def test_keys_and_values_as_tuples_get_a_sentence(model, tokens):
    """transformers took tuples of (keys, values) in earlier releases."""
    ids = tokens(1, 3)
    with pytest.raises(
        TypeError, match=r"past_key_values is a tuple but must be a cache of transformers, such as ALiBiCache\(\)"
    ):
        model(ids, past_key_values=((ids, ids),) * 2)
