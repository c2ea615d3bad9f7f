"""Patched T5, mT5 and UMT5 models equal the originals: outputs, all gradients, caches; and nothing square is built."""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from closeness import assert_within
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiCache, patch, record_attention
from alibi_attn.nn.linear.quantized import check_supported

pytestmark = pytest.mark.usefixtures("no_gradients")
KINDS = ("T5", "MT5", "UMT5")
SIZES = {"vocab_size": 60, "d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 6}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
COMPILED = ("T5", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("MT5", "UMT5")))
IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


@pytest.fixture
def t5():
    """t5("MT5", head="EncoderModel", **config) -> a model in evaluation mode whose biases differ between buckets."""

    @torch.no_grad()
    def builder(kind, head="ForConditionalGeneration", **changes):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")
        model = getattr(transformers, f"{kind}{head}")(
            config(**{**SIZES, **BUCKETS, **IDS, "dropout_rate": 0.0, **changes})
        )
        for name, weights in model.named_parameters():
            weights.normal_(0.0, 1.0 if "relative" in name else 0.15)
        for name, module in model.named_modules():
            if name.startswith("decoder.") and name.endswith("SelfAttention"):
                module.is_causal = True  # UMT5's of transformers 5.17 let its sdpa path see later tokens without a mask
        return model.eval()

    return builder


@pytest.fixture
def texts(tokens):
    """Arguments of a forward pass with padding on both sides, of the encoder and the decoder."""
    ids, answers = tokens(3, 40), tokens(3, 23, seed=2)
    mask, answer_mask = torch.ones_like(ids), torch.ones_like(answers)
    mask[1, 30:], mask[2, :7], answer_mask[1, 18:] = 0, 0, 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": answers,
        "decoder_attention_mask": answer_mask,
    }


def trained(model, given):
    """(logits that count, the gradients of all weights)"""
    model.zero_grad()
    logits = model(**given).logits[given["decoder_attention_mask"].bool()]
    (logits.square().sum() + logits[:, 3].sum()).backward()
    return logits.detach(), {name: weights.grad.clone() for name, weights in model.named_parameters()}


def in_pieces(model, given, cache, lengths):
    """The logits of all answers without their padding, which are read in pieces."""
    given = {**given, "decoder_attention_mask": None, "past_key_values": cache}
    pieces = given.pop("decoder_input_ids").split(lengths, dim=1)
    return torch.cat([model(**given, decoder_input_ids=piece).logits for piece in pieces], 1)


assert_same = functools.partial(assert_within, share=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
@torch.enable_grad()
def test_outputs_and_all_gradients_are_those_of_the_unpatched_model(kind, implementation, t5, texts):
    model = t5(kind, attn_implementation=implementation)
    logits, grads = trained(model, texts)
    assert min(float(grad.abs().max()) for grad in grads.values()) > 1e-6
    for backend, checkpointed in (("auto", None), ("native", None), ("auto", False), ("auto", True)):
        with patch(model, backend) as handle:
            assert len(handle.layers) == 6
            if checkpointed is not None:
                checkpoint_activations(model.train(), {"use_reentrant": checkpointed})
            actual, actual_grads = trained(model, texts)
        assert_same(actual, logits)
        for name, grad in grads.items():
            assert_same(actual_grads[name], grad)


@pytest.mark.parametrize("head", ["EncoderModel", "ForTokenClassification", "Model", "ForSequenceClassification"])
def test_other_heads(head, t5, texts):
    model, given = t5("T5", head), dict(texts)
    if head in ("EncoderModel", "ForTokenClassification"):
        given = {name: given[name] for name in ("input_ids", "attention_mask")}
    elif head == "ForSequenceClassification":
        given = {"input_ids": given["input_ids"].index_fill(1, torch.tensor([39]), 1)}
    expected = model(**given)[0]
    with patch(model):
        actual = model(**given)[0]
    if actual.ndim == 3:
        seen = texts["attention_mask" if actual.shape[1] == 40 else "decoder_attention_mask"].bool()
        actual, expected = actual[seen], expected[seen]
    assert_same(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generations_are_the_same(kind, options, t5, texts):
    model = t5(kind)
    given = {name: texts[name] for name in ("input_ids", "attention_mask")}
    options = {**options, "max_new_tokens": 9, "min_new_tokens": 9}
    expected = model.generate(**given, **options)
    with patch(model):
        assert model.generate(**given, **options).equal(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [DynamicCache, ALiBiCache])
def test_a_decoder_continues_its_cache_in_pieces(kind, own, t5, texts):
    model = t5(kind)
    given = {**texts, "decoder_attention_mask": torch.ones_like(texts["decoder_attention_mask"])}
    expected = model(**given).logits
    with patch(model):
        pieces = in_pieces(model, texts, EncoderDecoderCache(own(), DynamicCache()), [9, 1, 1, 12])
    assert_same(pieces, expected)


def test_dropout_of_weights_acts_in_training_by_the_seed(t5, tokens):
    model, ids = t5("T5", "EncoderModel", num_layers=1), tokens(2, 12)
    with patch(model):
        still = model(ids).last_hidden_state
        model.train()
        assert model(ids).last_hidden_state.equal(still)
        model.encoder.block[0].layer[0].SelfAttention.dropout = 0.3
        outputs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outputs.append(model(ids).last_hidden_state)
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(outputs[2])
    assert not outputs[0].equal(still)


@pytest.mark.parametrize("kind", KINDS)
@torch.enable_grad()
def test_nothing_square_is_built(kind, t5, tokens, largest):
    ids, answers = tokens(1, 1500), tokens(1, 1400, seed=2)
    mask, answer_mask = torch.ones_like(ids), torch.ones_like(answers)
    mask[0, 1300:], answer_mask[0, 1300:] = 0, 0
    model = t5(kind, num_layers=1)
    given = {"input_ids": ids, "decoder_input_ids": answers, "labels": answers}
    given |= {"attention_mask": mask, "decoder_attention_mask": answer_mask}
    with patch(model):
        assert largest(lambda: model(**given).loss.backward()) <= 2 * 1500 * 64
    with torch.no_grad():  # the check detects them
        assert largest(lambda: model(input_ids=ids[:, :300], decoder_input_ids=answers[:, :300])) >= 300 * 300


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_stay_patched_and_undo_leaves_nothing(kind, t5, texts):
    model = t5(kind)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    original, handle = model(**texts).logits, patch(model)
    with pytest.raises(ValueError, match="is patched already"):
        patch(model)
    expected = model(**texts).logits
    model_copy, handle_copy = copy.deepcopy((model, handle))
    for same in (model_copy, pickle.loads(pickle.dumps(model))):
        assert same(**texts).logits.equal(expected)
        with pytest.raises(ValueError, match="never builds"):
            same(**texts, output_attentions=True)
    handle_copy.undo()
    assert {name: set(vars(module)) for name, module in model_copy.named_modules()} == before
    assert model_copy(**texts).logits.equal(original)


def test_bf16_is_closer_to_the_truth_than_the_original(t5, texts):
    model = t5("T5", "EncoderModel")
    given = {name: texts[name] for name in ("input_ids", "attention_mask")}
    seen = given["attention_mask"].bool()
    truth = model.double()(**given).last_hidden_state[seen]
    model.to(torch.bfloat16)
    original = model(**given).last_hidden_state[seen].double()
    with patch(model):
        patched = model(**given).last_hidden_state[seen].double()
    assert (patched - truth).norm() <= 1.1 * (original - truth).norm()


@pytest.mark.parametrize("kind", COMPILED)
def test_it_compiles(kind, t5, texts):
    torch.compiler.reset()
    model = t5(kind, num_layers=1)
    seen = texts["decoder_attention_mask"].bool()
    expected = model(**texts).logits[seen]
    with patch(model):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_same(compiled(**texts, use_cache=False).logits[seen], expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_with_a_static_cache(kind, t5, texts):
    torch.compiler.reset()
    model = t5(kind)
    expected = model(**{**texts, "decoder_attention_mask": None}).logits
    caches = [StaticCache(model.config, max_cache_len=length) for length in (30, 40)]
    with patch(model):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        pieces = in_pieces(compiled, texts, EncoderDecoderCache(*caches), [20, 3])
    assert_same(pieces, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_attentions": True}, "which a patched model never builds"),
        ({"segment_ids": torch.zeros(3, 40).long()}, "T5Stack got segment_ids, which decoders of T5 do not support"),
        ({"prefix_len": torch.zeros(3).long()}, "T5Stack got prefix_len, which encoders of T5 do not support"),
        ({"head_mask": torch.ones(2, 6)}, "T5Stack got head_mask, which has no effect"),
        ({"attention_mask": torch.ones(3, 1, 40, 40)}, r"has shape \[3, 1, 40, 40\] but must be \[B, S\]"),
        ({"attention_mask": torch.ones(3, 39)}, "covers 39 tokens but the encoder has 40"),
        ({"attention_mask": torch.ones(2, 40)}, "has 2 rows but the batch has 3"),
        ({"decoder_attention_mask": torch.ones(3, 1, 23, 23)}, r"has shape \[3, 1, 23, 23\] but must be \[B, S\]"),
        ({"decoder_attention_mask": torch.ones(3, 22)}, "covers 22 positions but must cover 23"),
        ({"past_key_values": DynamicCache()}, "is DynamicCache but must be an EncoderDecoderCache"),
        ({"input_ids": torch.zeros(3, 0, dtype=torch.long), "attention_mask": None}, r"T ≥ 1 tokens"),
    ],
)
def test_what_is_refused(changes, message, t5, texts):
    model = t5("T5")
    with patch(model), pytest.raises(ValueError, match=message):
        model(**{**texts, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "checkpoint"}, 'T5 models support only "exact"'),
        ({"backend": "banded"}, "'banded' but must be one of 'auto', 'native', 'fused', 'dense', 'reference' for T5"),
    ],
)
def test_options_that_are_refused_change_nothing(options, message, t5):
    model = t5("UMT5")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        patch(model, **options)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_some_rows_are_those_of_the_original(kind, t5, texts):
    model = t5(kind, attn_implementation="eager")
    output = model(**texts, output_attentions=True)
    crosses = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    expected = [*output.encoder_attentions, *(weights for layer in crosses for weights in layer)]
    seen = texts["attention_mask"].bool(), texts["decoder_attention_mask"].bool()
    with patch(model), record_attention(model, rows=[-3, 8, 0]) as passes:
        assert_same(model(**texts).logits[seen[1]], output.logits[seen[1]])
    (found,) = passes
    assert list(found) == list(range(6))
    for at, weights in found.items():
        of_original = expected[at][:, :, [-3, 8, 0]]
        counts = seen[at > 1][:, [-3, 8, 0]]
        assert_same(weights.transpose(1, 2)[counts], of_original.transpose(1, 2)[counts])


@pytest.mark.parametrize("kind", KINDS)
@torch.enable_grad()
def test_several_texts_in_a_row_of_an_encoder_are_each_alone(kind, t5, tokens):
    model, lengths = t5(kind, "EncoderModel"), (9, 1, 14)
    ids = tokens(1, sum(lengths))
    alone = torch.cat([model(text).last_hidden_state for text in ids.split(lengths, 1)], 1)
    grads = torch.autograd.grad(alone.square().sum(), list(model.parameters()))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = [{"segment_ids": numbers}, {"position_ids": positions}, {"cu_seq_lens_q": bounds.int()}]
    with patch(model):
        for packing in given:
            together = model(ids, **packing).last_hidden_state
            assert_same(together, alone)
        of_patched = torch.autograd.grad(together.square().sum(), list(model.parameters()))
        assert not torch.allclose(model(ids).last_hidden_state, alone, atol=1e-3)
    for grad, expected in zip(of_patched, grads, strict=True):
        assert_same(grad, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_layers_in_int8(kind, gated, t5, texts):
    try:
        check_supported()
    except ValueError as reason:
        pytest.skip(str(reason))
    model = t5(kind, feed_forward_proj="gated-gelu" if gated else "relu")
    seen, expected = texts["decoder_attention_mask"].bool(), model(**texts).logits
    handle = patch(model, linears="int8")
    assert len(handle.linears) == 2 * (4 + 8) + 4 * (2 + gated)
    actual = model(**texts).logits
    assert 1e-4 < (actual - expected)[seen].norm() / expected[seen].norm() < 0.1


def test_float16_in_int8_is_refused(t5):
    with pytest.raises(ValueError, match="in float16 T5 keeps some layers in float32"):
        patch(t5("T5").half(), linears="int8")


def test_a_layer_outside_its_stack_is_refused(t5):
    model = t5("T5")
    layer: nn.Module = model.encoder.block[0].layer[0].SelfAttention
    with patch(model), pytest.raises(ValueError, match="call the whole model that was patched"):
        layer(torch.zeros(1, 4, 48), mask=torch.zeros(1, 1, 4, 4))
