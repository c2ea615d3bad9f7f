"""Keys and values of an ALiBiCache that its owner assigns or writes into: the next token reads what is there."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache

from alibi_attn.attention.run import decoding, near_keys
from alibi_attn.hf import ALiBiCache, patch

LENGTH = 330


def filled(model, ids, kind=ALiBiCache):
    cache = kind()
    model(ids, past_key_values=cache)
    return cache


def shortened(layer):
    layer.keys, layer.values = layer.keys[:, :, :300], layer.values[:, :, :300]


def dominant(layer):
    layer.keys[:, :, 5] *= 3000


def large_values(layer):
    layer.values[:, :, 5] *= 3e4


def replaced_keys(layer):
    keys = layer.keys.clone()
    keys[:, :, 5] *= 3000
    layer.keys = keys


def from_an_earlier_view(layer):
    view = layer.keys[:, 1:3, 4:9]
    layer.keys.sum()
    view.fill_(40.0)


CHANGES = [shortened, dominant, large_values, replaced_keys, from_an_earlier_view]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_changed_cache_gives_the_logits_of_a_dynamic_one(family, mode, change, build, tokens, monkeypatch):
    monkeypatch.setattr(decoding, "LONG", 0)
    monkeypatch.setattr(near_keys, "FEW", 32)
    model, ids = build(family, **({"max_seq_len": 512} if family == "mpt" else {})), tokens(1, LENGTH)
    with mode(), patch(model):
        expected, actual = filled(model, ids, DynamicCache), filled(model, ids)
        model(ids[:, :1], past_key_values=expected), model(ids[:, :1], past_key_values=actual)  # norms are kept now
        before = model(ids[:, :1], past_key_values=copy.deepcopy(actual)).logits
        for layer in (*expected.layers, *actual.layers):
            change(layer)
        assert actual.get_seq_length() == expected.get_seq_length()
        for _ in range(2):
            wanted = model(ids[:, 1:2], past_key_values=expected).logits
            found = model(ids[:, 1:2], past_key_values=actual).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids[:, :1], past_key_values=copy.deepcopy(expected)).logits, before, atol=1e-3)


def test_iterating_and_half_an_assignment(build, tokens):
    model, ids = build("bloom"), tokens(2, 9)
    with torch.no_grad(), patch(model):
        expected, actual = filled(model, ids, DynamicCache), filled(model, ids)
        for (keys, values, none), (their_keys, their_values, _) in zip(actual, expected, strict=True):
            assert none is None
            torch.testing.assert_close(keys, their_keys)
            torch.testing.assert_close(values, their_values)
        layer = actual.layers[0]
        layer.keys = layer.keys[:, :, :5]
        with pytest.raises(ValueError, match=r"\[2, 6, 5\] and values \[2, 6, 9\] of a layer .* differ; assign both"):
            model(ids[:, :1], past_key_values=actual)
        layer.values = layer.values[:, :, :7]
        with pytest.raises(ValueError, match=r"keys \[2, 6, 5\] and values \[2, 6, 7\] of a layer"):
            model(ids[:, :1], past_key_values=actual)
        layer.values = layer.values[:, :, :5]
        assert layer.get_seq_length() == 5
        layer.keys = layer.values = None
        assert layer.get_seq_length() == 0


def test_the_token_ids_of_a_changed_cache_are_unknown(build, tokens, tmp_path):
    model, ids = build("bloom"), tokens(1, 90)
    with torch.no_grad(), patch(model):
        for change in (shortened, dominant):
            cache = filled(model, ids)
            assert cache.tokens() is not None
            change(cache.layers[0])
            assert cache.tokens() is None
            with pytest.raises(ValueError, match="changed"):
                cache.save(tmp_path / "cache")
            cache.crop(-cache.get_seq_length())
            model(ids, past_key_values=cache)
            assert cache.tokens() is not None


def test_a_cache_in_files_refuses_changes(build, tokens, tmp_path):
    model, ids = build("bloom"), tokens(1, 90)
    with torch.no_grad(), patch(model):
        cache = ALiBiCache(tmp_path / "cache")
        model(ids, past_key_values=cache)
        layer = cache.layers[0]
        with pytest.raises(ValueError, match=r"cannot be assigned; use crop\(\)"):
            layer.keys = layer.keys[:, :, :5]
        layer.keys[:, :, 5] *= 3000
        with pytest.raises(ValueError, match="changed in place"):
            model(ids[:, :1], past_key_values=cache)
        expected = filled(model, ids, DynamicCache)
        expected.layers[0].keys[:, :, 5] *= 3000
        found = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        torch.testing.assert_close(found, model(ids[:, :1], past_key_values=expected).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_norms_survive_the_caches_own_writes(mode, build, tokens, monkeypatch):
    """Appending, cropping and reordering must not read all keys again."""
    model, ids = build("bloom"), tokens(2, LENGTH)
    with mode(), patch(model):
        cache, counts = filled(model, ids), []
        model(ids[:, :1], past_key_values=cache)
        measured = decoding.measured_norms

        def counted(key, value):
            counts.append(key.shape[2])
            return measured(key, value)

        monkeypatch.setattr("alibi_attn.nn.cache.storage.measured_norms", counted)
        for _ in range(70):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-30)
        cache.reorder_cache(torch.tensor([1, 0]))
        for _ in range(40):
            model(ids[:, :1], past_key_values=cache)
        assert counts == [64] * 4  # two new tiles in each of two layers
        assert not cache.layers[0].store.notice_changes()


def test_a_cache_in_files_notices_that_its_model_was_trained(build, tokens, tmp_path):
    model, ids = build("bloom"), tokens(1, 9)
    with torch.no_grad(), patch(model):
        cache = ALiBiCache(tmp_path / "cache")
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        model.transformer.h[0].mlp.dense_4h_to_h.weight += 1.0
        with pytest.raises(ValueError, match="other weights"):
            model(ids[:, :1], past_key_values=cache)
