"""ALiBiCache gives the results of DynamicCache while reading only the keys within reach."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache

from alibi_attn.hf import ALiBiCache, patch

FAMILIES = ["bloom", "mpt", "falcon", "falcon multi-query", "falcon new"]


@pytest.mark.parametrize("family", FAMILIES)
def test_generations_are_those_of_a_dynamic_cache(family, near, build, tokens):
    model, ids = build(family), tokens(1, 30)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "use_cache": True}
    expected = model.generate(ids, past_key_values=DynamicCache(), **options)
    cache = ALiBiCache()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert cache.is_initialized
    assert not near, "an unpatched model scores all keys"
    with patch(model):
        assert torch.equal(model.generate(ids, past_key_values=ALiBiCache(), **options), expected)
    assert [call["length"] for call in near] == [length for length in range(31, 42) for _ in range(2)]


@pytest.mark.parametrize(("family", "options"), [("mpt", {}), ("bloom", {"use_cache": False})])
def test_a_text_that_the_cache_holds_is_not_read_again(family, options, build, tokens):
    """An MPT's config has use_cache=False: `generate` then passes the whole text for every token, also with a cache."""
    model = build(family)
    with patch(model), pytest.raises(ValueError, match="holds 20 tokens, but use_cache is False"):
        model.generate(tokens(1, 20), past_key_values=ALiBiCache(), max_new_tokens=3, **options)


@pytest.mark.parametrize("model", ["ours", "mpt"], indirect=True)
def test_a_long_chunk_continues_a_short_one_in_training_mode(model, tokens):
    ids, cache = tokens(1, 30), ALiBiCache()
    with torch.no_grad():
        expected = model.train()(ids).logits
        parts = [model(part, past_key_values=cache).logits for part in ids.split([5, 25], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bloom", "falcon new"])
def test_beams_and_assisted_generation_work(family, near, build, tokens):
    model, ids = build(family), tokens(2, 20)
    beams = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "use_cache": True}
    expected = model.generate(ids, past_key_values=DynamicCache(), **beams)
    assistant, one = build(family, seed=5), tokens(1, 20)
    assisted = {"max_new_tokens": 8, "do_sample": False, "assistant_model": assistant}
    also = model.generate(one, past_key_values=DynamicCache(), **assisted)
    with patch(model):
        assert torch.equal(model.generate(ids, past_key_values=ALiBiCache(), **beams), expected)
        assert torch.equal(model.generate(one, past_key_values=ALiBiCache(), **assisted), also)
    assert near


def left_padded(ids, lengths):
    """(tokens, mask): only the last lengths[b] tokens of row b are visible."""
    at = ids.shape[1] - torch.tensor(lengths)[:, None]
    mask = (torch.arange(ids.shape[1]) >= at).long()
    return ids * mask, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_padded_batch_are_those_of_its_rows_alone(family, near, build, tokens):
    """With certified reaches (short rows are read whole), in small chunks, and with a row that ends before the rest."""
    lengths, last, model = [400, 300, 77, 20], 7, build(family)
    ids, mask = left_padded(tokens(4, 400), lengths)
    mask[1, -last:] = 0  # finished: its further tokens are ignored
    cuts = [380, 4, 1, 1, 6, 1, 7]
    with patch(model), torch.no_grad():
        cache, together = ALiBiCache(), []
        for part in ids.split(cuts, dim=1):
            seen = cache.get_seq_length() + part.shape[1]
            together.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
        assert len(near) == 2 * (len(cuts) - 1)
        together = torch.cat(together, dim=1)
        for b, length in enumerate(lengths):
            stop = 400 - last if b == 1 else 400
            alone = model(ids[b : b + 1, 400 - length : stop], use_cache=False).logits[0]
            torch.testing.assert_close(together[b, 400 - length : stop], alone, rtol=1e-4, atol=1e-4)
        everything = model(ids, attention_mask=mask, use_cache=False).logits[1, -last:]
        torch.testing.assert_close(together[1, -last:], everything, rtol=1e-4, atol=1e-4)


def test_far_and_hidden_keys_are_not_read_under_padding(near, build, tokens):
    model = build("mpt", attention={"alibi_bias_max": 2})  # slopes from 0.79 to 0.25
    ids, mask = left_padded(tokens(2, 2600), [2600, 1300])
    more = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
    with patch(model), torch.no_grad():
        cache = ALiBiCache()
        model(ids, attention_mask=mask, past_key_values=cache)
        logits = model(ids[:, -1:], attention_mask=more, past_key_values=cache).logits
        cache.crop(-1)
        for layer in cache.layers:
            for x in (layer.keys.data, layer.values.data):  # norms of the visible part of a row's first tile stay
                x[0, :, :1024], x[1, :, :1300], x[1, :, 1344:1500] = torch.nan, torch.nan, torch.nan
        assert torch.equal(model(ids[:, -1:], attention_mask=more, past_key_values=cache).logits, logits)
        cache.crop(-1)
        cache.layers[0].keys[:, :, -3] = torch.nan
        assert bool(model(ids[:, -1:], attention_mask=more, past_key_values=cache).logits.isnan().all())


def test_holes_and_a_gradient_score_all_keys(near, build, tokens):
    model, ids = build("mpt"), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 3:5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(ids, **options)
    with patch(model):
        assert torch.equal(model.generate(ids, past_key_values=ALiBiCache(), **options), expected)
        cache = ALiBiCache()
        for part in (ids[:, :11], ids[:, 11:]):
            logits = model(part, past_key_values=cache).logits
        logits.sum().backward()
        assert not near


@pytest.mark.parametrize(("received", "described"), [(3, "format 3"), (None, "no format"), ("1", "format '1'")])
def test_a_pickle_of_another_format_is_refused_by_name(received, described, build, tokens):
    cache = ALiBiCache()
    with torch.no_grad(), patch(model := build("bloom")):
        model(tokens(1, 3), past_key_values=cache)
    state = cache.__getstate__()
    assert list(state) == ["format", "stores"]  # of format 1: a change of these names needs a new number
    unpickled = ALiBiCache.__new__(ALiBiCache)
    message = f"pickled ALiBiCache has {described} but .* reads format 1 and 2; .* a new ALiBiCache"
    with pytest.raises(ValueError, match=message):
        unpickled.__setstate__({**state, "format": received})


def test_positive_crops_are_lengths_and_offloading_is_refused(build, tokens):
    cache = ALiBiCache()
    with torch.no_grad():
        build("bloom")(tokens(1, 9), past_key_values=cache)
    for crop, left in ((20, 9), (5, 5), (-2, 3), (0, 3), (-9, 0)):
        cache.layers[0].crop(crop)
        assert len(cache.layers[0].store) == left
    with pytest.raises(NotImplementedError, match="DynamicCache"):
        cache.layers[0].offload()


@torch.no_grad()
def test_a_cache_belongs_to_one_layer_of_one_model(build, tokens):
    model, other = build("bloom"), build("bloom", seed=1)
    ids, last = tokens(1, 10).split((9, 1), dim=1)
    for one in (model, other):
        patch(one)
    cache = ALiBiCache()
    want = model(tokens(1, 10), past_key_values=ALiBiCache()).logits[:, -1:]
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"holds the keys of another model.* pass a new ALiBiCache\(\), or a copy"):
        other(ids, past_key_values=cache)
    twin = copy.deepcopy(cache)
    torch.testing.assert_close(model(last, past_key_values=cache).logits, want)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(last, past_key_values=twin).logits, want)
    cache.reset()
    other(ids, past_key_values=cache)

    first, second = (block.self_attention for block in model.transformer.h[:2])
    second.layer_idx = first.layer_idx
    with pytest.raises(ValueError, match="of another model or layer"):
        model(ids, past_key_values=ALiBiCache())


def interrupted(model, ids, cache):
    """A pass over more tokens that ends before the second layer appends, as Ctrl-C does."""
    hook = model.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, past_key_values=cache, use_cache=True)
    hook.remove()


@torch.no_grad()
def test_an_unpatched_model_goes_on_after_an_interrupted_pass(build, tokens):
    model, ids, cache = build("bloom", n_layer=3), tokens(1, 30), ALiBiCache()
    model(ids[:, :20], past_key_values=cache)
    interrupted(model, ids[:, 20:25], cache)
    assert (cache.get_seq_length(), cache.get_seq_length(0), cache.get_seq_length(1)) == (20, 25, 20)
    expected = model(ids).logits
    torch.testing.assert_close(model(ids[:, 20:], past_key_values=cache).logits, expected[:, 20:])
    cache = ALiBiCache()  # without `patch` it does not know how many layers the model has
    interrupted(model, ids[:, :20], cache)
    with pytest.raises(ValueError, match=r"layer 0 .* holds 30 tokens and layer 1 holds 10"):
        model(ids[:, 20:], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("model", ["bloom", "mpt", "ours"], indirect=True)
def test_keys_and_values_as_tuples_get_a_sentence(model, tokens):
    """transformers took tuples of (keys, values) in earlier releases."""
    ids = tokens(1, 3)
    with pytest.raises(TypeError, match=r"is a tuple but must be a cache of transformers, such as ALiBiCache\(\)"):
        model(ids, past_key_values=((ids, ids),) * 2)
