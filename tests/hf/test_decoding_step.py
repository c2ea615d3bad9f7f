"""A decoding step in one call gives the logits and keys of the modules, and leaves every changed model to its modules."""

import copy
import dataclasses
import functools
import gc
import pickle
import weakref

import pytest
import torch
from closeness import assert_within
from decoder_oracle import STEP_ERRORS
from torch import nn
from transformers import DynamicCache

from alibi_attn.attention.backends.native import build as kernels
from alibi_attn.attention.backends.native import decoder_layers as native
from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.nn.linear import fastest, quantized

pytestmark = pytest.mark.usefixtures("no_gradients")
if reason := kernels.why_not():
    pytest.skip(reason, allow_module_level=True)

FAMILIES = ("bloom", "mpt")
SIZES = {"bloom": {"hidden_size": 64, "n_head": 4}, "mpt": {"d_model": 64, "n_heads": 4, "max_seq_len": 256}}
PROMPT = 70  # more than a tile, so that norms are known


@pytest.fixture
def steps(monkeypatch):
    """The results of the steps that ran in one call."""
    done = []

    def run(dtype, call):
        done.append(native_run(dtype, call))
        return done[-1]

    native_run = native.run
    monkeypatch.setattr(native, "run", run)
    return done


@pytest.fixture
def model(build):
    return lambda family="bloom", **changes: build(family, **SIZES[family], **changes)


@pytest.fixture
def patched_model(build_patched):
    return lambda family="bloom": build_patched(family, **SIZES[family])


def blocks(model):
    body = model.transformer
    return body.h if hasattr(body, "h") else body.blocks


@torch.no_grad()
def decoded(model, ids, *, at_once=1, cache=None, mask=None):
    """The logits of all tokens after a prompt, read `at_once` at a time, and the cache."""
    cache = ALiBiCache() if cache is None else cache
    shown = None if mask is None else mask[:, :PROMPT]
    model(ids[:, :PROMPT], past_key_values=cache, attention_mask=shown, use_cache=True)
    logits = []
    for start in range(PROMPT, ids.shape[1], at_once):
        stop = min(start + at_once, ids.shape[1])
        shown = None if mask is None else mask[:, :stop]
        output = model(ids[:, start:stop], past_key_values=cache, attention_mask=shown, use_cache=True)
        assert output.past_key_values is cache
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


FEW_ROWS = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


@pytest.mark.parametrize(
    ("batch", "at_once", "count", "dtype"),
    [*((1, 1, 66, dtype) for dtype in STEP_ERRORS), *((*rows, 12, torch.float32) for rows in FEW_ROWS)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_the_logits_of_a_whole_pass(family, batch, at_once, count, dtype, model, tokens, steps):
    original, ids = model(family), tokens(batch, PROMPT + count)
    expected = original(ids, use_cache=False).logits[:, PROMPT:]
    patch(original)
    actual, cache = decoded(original.to(dtype), ids, at_once=at_once)
    assert steps == [True] * (count // at_once)
    assert_within(actual, expected, STEP_ERRORS[dtype])
    assert cache.get_seq_length() == PROMPT + count


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_left_changes_nothing(family, patched_model, tokens, steps):
    patched, ids = patched_model(family), tokens(2, PROMPT + 5)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    actual, _ = decoded(patched, ids, mask=mask)
    assert steps == [True] * 5
    alone = patched(ids[:1, 9:], use_cache=False).logits[:, PROMPT - 9 :]
    other = patched(ids[1:], use_cache=False).logits[:, PROMPT:]
    assert_within(actual, torch.cat([alone, other]), 2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_int8_is_that_of_the_modules(family, model, tokens, steps):
    try:
        quantized.check_supported()
    except ValueError as error:
        pytest.skip(str(error))
    patched, ids = model(family), tokens(2, PROMPT + 9)
    patch(patched, linears="int8")
    actual, cache = decoded(patched, ids)
    assert steps == [True] * 9
    blocks(patched)[1].register_forward_hook(lambda *_: None)
    expected, other = decoded(patched, ids)
    assert len(steps) == 9
    # An activation on the border between two codes may round to the other one; most do not.
    assert_within(actual, expected, 5e-3)
    assert float((actual - expected).abs().median()) <= 1e-6 * float(expected.abs().max())
    assert_within(cache.layers[0].keys, other.layers[0].keys, 2e-6)


def test_changed_weights_are_used_and_a_wrong_one_is_noticed(patched_model, tokens):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    before, _ = decoded(patched, ids)
    for name, weight in blocks(patched)[1].named_parameters():
        kept = weight.data.clone()
        weight.data.view(-1)[-1] += 0.5
        expected = patched(ids, use_cache=False).logits[:, PROMPT:]
        if "query_key_value" not in name:  # a value's last number changes little
            with pytest.raises(AssertionError):
                assert_within(before, expected, 2e-6)
        assert_within(decoded(patched, ids)[0], expected, 2e-6)
        weight.data = kept


class Adapted(nn.Linear):
    pass


def assigned(weight, of):
    weight.data = of(weight.data)


def give_other_slopes(blocks):
    for block in blocks:
        settings = block.self_attention.alibi_settings
        block.self_attention.alibi_settings = dataclasses.replace(settings, slopes=(0.5,) * 4)


def replaced(linear):
    linear.forward = functools.partial(nn.functional.linear, weight=linear.weight, bias=linear.bias)


CHANGES = {
    "a hook": lambda model: blocks(model)[1].mlp.dense_4h_to_h.register_forward_hook(lambda *_: None),
    "a hook of a block": lambda model: blocks(model)[0].register_forward_pre_hook(lambda *_: None),
    "another forward": lambda model: replaced(blocks(model)[0].mlp.dense_h_to_4h),
    "another class": lambda model: setattr(blocks(model)[1].self_attention.dense, "__class__", Adapted),
    "another norm": lambda model: setattr(blocks(model)[0], "input_layernorm", nn.RMSNorm(64)),
    "another attention": lambda model: vars(blocks(model)[0].self_attention).update(attend=lambda q, *_, **__: q),
    "in training": lambda model: blocks(model)[1].mlp.train(),
    "not contiguous": lambda model: assigned(blocks(model)[0].mlp.dense_h_to_4h.weight, lambda x: x.T.contiguous().T),
    "transposed in place": lambda model: assigned(blocks(model)[1].self_attention.dense.weight, lambda x: x.T),
    "all hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "slopes of one layer": lambda model: give_other_slopes(blocks(model)[1:]),
    "residual of one layer": lambda model: setattr(blocks(model)[1], RESIDUAL, True),
}
RESIDUAL = "apply_residual_connection_post_layernorm"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_module_by_module(change, used, patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    if used:
        decoded(patched, ids)
    CHANGES[change](patched)
    actual, cache = decoded(patched, ids)
    assert steps == [True, True] * used
    assert_within(actual, patched(ids, use_cache=False).logits[:, PROMPT:], 2e-6)
    assert cache.get_seq_length() == PROMPT + 2


def new_layer(model):
    layer = nn.Linear(64, 256)
    layer.forward = functools.partial(fastest.forward, layer)
    blocks(model)[1].mlp.dense_h_to_4h = layer


def other_residual(model):
    for block in blocks(model):
        setattr(block, RESIDUAL, True)


def elsewhere_in_memory(model):
    for weight in model.parameters():
        assigned(weight, torch.clone)


MORE_CHANGES = {
    "new memory": lambda model: assigned(blocks(model)[1].mlp.dense_4h_to_h.weight, torch.randn_like),
    "a new parameter": lambda model: setattr(
        blocks(model)[0].post_attention_layernorm, "bias", nn.Parameter(torch.randn(64))
    ),
    "no bias": lambda model: setattr(blocks(model)[0].self_attention.query_key_value, "bias", None),
    "a new layer": new_layer,
    "a new embedding": lambda model: setattr(
        model.transformer, "word_embeddings", nn.Embedding.from_pretrained(torch.randn(60, 64))
    ),
    "another eps": lambda model: setattr(blocks(model)[1].input_layernorm, "eps", 0.5),
    "another residual": other_residual,
    "other slopes": lambda model: give_other_slopes(blocks(model)),
    "elsewhere in memory": elsewhere_in_memory,
}


@pytest.mark.parametrize("change", MORE_CHANGES)
def test_what_changed_since_the_last_step_is_used(change, patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    before, _ = decoded(patched, ids)
    MORE_CHANGES[change](patched)
    actual, _ = decoded(patched, ids)
    assert steps == [True] * 4
    assert_within(actual, patched(ids, use_cache=False).logits[:, PROMPT:], 2e-6)
    assert torch.equal(actual, before) == (change == "elsewhere in memory")


def test_a_model_that_decoded_is_not_kept(model, tokens, steps):
    patched, ids = model(), tokens(1, PROMPT + 2)
    undo = patch(patched).undo
    decoded(patched, ids)
    weight = weakref.ref(blocks(patched)[0].mlp.dense_h_to_4h.weight)
    undo()
    blocks(patched)[0].mlp.dense_h_to_4h = None
    gc.collect()
    assert weight() is None
    assert steps == [True, True]


@torch.enable_grad()
def test_other_calls_run_module_by_module(patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 1)
    expected, _ = decoded(patched, ids)
    assert steps == [True]
    assert_within(decoded(patched, ids, cache=DynamicCache())[0], expected, 2e-6)
    cache = ALiBiCache()
    with torch.no_grad():
        patched(ids[:, :PROMPT], past_key_values=cache)
        embedded = patched.transformer.word_embeddings(ids[:, PROMPT:])
        assert_within(patched(inputs_embeds=embedded, past_key_values=cache).logits, expected, 2e-6)
        cache.crop(-1)
        with torch.autocast("cpu", torch.bfloat16):
            decoded(patched, ids)
    assert patched(ids[:, PROMPT:], past_key_values=cache).logits.requires_grad
    assert steps == [True]


def test_the_checkpoints_numbers_and_named_backends_run_module_by_module(model, tokens, steps):
    ids = tokens(1, PROMPT + 1)
    for options in ({"numerics": "checkpoint"}, {"backend": "dense"}):
        patched = model()
        patch(patched, **options)
        decoded(patched, ids)
    decoded(model("mpt", attention={"clip_qkv": 1.0}), ids)
    assert steps == []


def test_masks_with_holes_are_left_to_the_modules(patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    actual, _ = decoded(patched, ids, mask=mask)
    assert steps == []
    expected, _ = decoded(patched, ids[mask.bool()][None])
    torch.testing.assert_close(actual[:, -1], expected[:, -1], rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_finite_are_left_to_the_modules(patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    patched.transformer.word_embeddings.weight.data[ids[0, -2], 3] = torch.inf
    actual, cache = decoded(patched, ids)
    assert steps == [False, False]
    assert actual.isnan().any()
    assert cache.get_seq_length() == PROMPT + 2


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_use_their_own_weights(twin, patched_model, tokens, steps):
    patched, ids = patched_model(), tokens(1, PROMPT + 2)
    other = twin(patched)
    expected, _ = decoded(patched, ids)
    for weight in patched.parameters():
        weight.data.zero_()
    assert_within(decoded(other, ids)[0], expected, 2e-6)
    assert steps == [True] * 4


def test_an_interrupted_step_leaves_the_cache_as_it_was(patched_model, tokens, monkeypatch):
    patched, ids = patched_model(), tokens(1, PROMPT + 1)
    expected, cache = decoded(patched, ids)
    cache.crop(-1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patching:
        patching.setattr(native, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            patched(ids[:, PROMPT:], past_key_values=cache)
    assert cache.get_seq_length() == PROMPT
    assert_within(patched(ids[:, PROMPT:], past_key_values=cache).logits, expected, 2e-6)
