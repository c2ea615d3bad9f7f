"""`record_attention` gives the weights of transformers' own eager path, and of the formulas."""

import math

import pytest
import torch
from encoder_oracle import small_encoder

from alibi_attn import alibi_slopes
from alibi_attn.hf import (
    ALiBiCache,
    ALiBiCausalLMConfig,
    ALiBiForCausalLM,
    patch,
    record_attention,
)
from alibi_attn.hf.patching.capture_qk import watched

pytestmark = pytest.mark.usefixtures("no_gradients")

LEFT = torch.tensor([[0, 0, 0] + [1] * 17, [1] * 20])
HOLE = torch.tensor([[1] * 5 + [0, 0] + [1] * 13, [1] * 20])
TEXTS = (torch.arange(20) // 8).expand(2, -1)


def decoder(**changes: object) -> ALiBiForCausalLM:
    sizes = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    torch.manual_seed(0)
    return ALiBiForCausalLM(ALiBiCausalLMConfig(**sizes, num_key_value_heads=2, **changes)).eval()


@pytest.mark.parametrize("mask", [None, LEFT, HOLE], ids=["no mask", "left padding", "a hole"])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_the_weights_are_those_of_the_unpatched_model(family, mask, build, tokens):
    model, ids = build(family), tokens(2, 20)
    model.set_attn_implementation("eager")
    true = model(ids, attention_mask=mask, output_attentions=True).attentions
    rows = [-1, 7, 12]
    with patch(model), record_attention(model, rows=rows) as passes:
        model(ids, attention_mask=mask)
    assert [list(weights) for weights in passes] == [[0, 1]]
    for found, layer in zip(passes[0].values(), true, strict=True):
        torch.testing.assert_close(found, layer[:, :, rows], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["falcon", "falcon multi-query", "falcon new"])
def test_falcon_attends_by_its_formula(family, build, tokens):
    """Its eager path adds the bias twice, so the truth is softmax((q·k − m·(i − j))/√D), typed here."""
    model, ids, seen = build(family), tokens(2, 20), []
    patch(model)
    layer = model.transformer.h[1].self_attention
    layer.query_key_value.register_forward_hook(lambda _, given, output: seen.append(layer._split_heads(output)))
    with record_attention(model, rows=[4], layers=[-1]) as passes:
        model(ids)
    query, key = (x.transpose(1, 2).double() for x in seen[0][:2])
    away = torch.arange(4, -1, -1)
    scores = query[:, :, 4:5] @ key[:, :, :5].mT - torch.tensor(alibi_slopes(6))[:, None, None] * away
    true = torch.nn.functional.pad((scores / math.sqrt(8)).softmax(-1), (0, 15))
    torch.testing.assert_close(passes[0][1].double(), true.expand(2, 6, 1, 20), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("mask", [None, LEFT], ids=["no mask", "left padding"])
def test_an_encoder_attends_by_its_formula(mask, tokens):
    """Rows count in the padded batch, although the encoder packs it otherwise."""
    model, ids, seen = small_encoder(vocab_size=60), tokens(2, 20), []
    without = model(ids, mask).last_hidden_state
    model.encoder.layer[1].attention.self.Wqkv.register_forward_hook(lambda _, given, output: seen.append(output))
    with record_attention(model, rows=slice(5, 8)) as passes:
        output = model(ids, mask).last_hidden_state
    torch.testing.assert_close(output, without, rtol=1e-4, atol=1e-5)
    query, key, _ = (x.unflatten(-1, (6, 8)).transpose(1, 2).double() for x in seen[0].chunk(3, dim=-1))
    at = torch.arange(20)
    away = (at[5:8, None] - at).abs()
    scores = query[:, :, 5:8] @ key.mT / math.sqrt(8) - torch.tensor(alibi_slopes(6))[:, None, None] * away
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None] == 0, -math.inf)
    torch.testing.assert_close(passes[0][1].double(), scores.softmax(-1), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "ours"])
def test_texts_in_one_row_do_not_see_one_another(family, build_patched, tokens):
    model, ids = decoder() if family == "ours" else build_patched(family), tokens(2, 20)
    with record_attention(model, rows=[11], layers=[1]) as passes:
        model(ids, segment_ids=TEXTS)
    with record_attention(model, rows=[3], layers=[1]) as alone:
        model(ids[:, 8:16])
    weights = passes[0][1]
    assert not bool(weights[..., :8].any())
    torch.testing.assert_close(weights[..., 8:16], alone[0][1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["bloom", "ours"])
def test_generate_makes_one_pass_per_token(family, build_patched, tokens):
    model, ids = decoder() if family == "ours" else build_patched(family), tokens(2, 20)
    generated = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, past_key_values=ALiBiCache(), **generated)
    with record_attention(model, rows=[-1]) as passes:
        found = model.generate(ids, past_key_values=ALiBiCache(), **generated)
    assert torch.equal(found, expected)
    assert [weights[1].shape[-1] for weights in passes] == [20, 21, 22]
    with record_attention(model, rows=[-1]) as whole:
        model(found[:, :22])
    for layer, weights in passes[2].items():
        torch.testing.assert_close(weights, whole[0][layer], rtol=1e-4, atol=2e-6)


@torch.enable_grad()
def test_the_weights_have_gradients(tokens):
    model = decoder()
    with record_attention(model, rows=[-1], layers=[2]) as passes:
        model(tokens(1, 9))
    (passes[0][2][..., 0] ** 2).sum().backward()
    assert bool(model.layers[0].attention.qkv_proj.weight.grad.abs().max() > 0)


def test_the_model_is_as_before_afterwards(build_patched, tokens):
    model, ids = build_patched("bloom"), tokens(1, 9)
    before = model(ids).logits
    with record_attention(model, rows=[5]), pytest.raises(ValueError, match="there are 1 queries"):
        model(ids[:, :1])
    assert torch.equal(model(ids).logits, before)


def assert_refused(model, message: str, **options) -> None:
    with pytest.raises(ValueError, match=message), record_attention(model, rows=[0], **options):
        pass


def test_what_cannot_be_recorded_is_refused(build, tokens):
    model = build("bloom")
    assert_refused(model, "has no layer that uses alibi_attention")
    with patch(model, numerics="checkpoint"):
        assert_refused(model, 'use numerics="exact"')
    patch(model)
    for layers in ([2], [-3], [True], [0.5]):
        assert_refused(model, "has 2 attention layers; pass indices from -2 to 1", layers=layers)
    with record_attention(model, rows=[0]):
        assert_refused(model, "replaced .*undo that first")
    model.train()
    model.transformer.gradient_checkpointing = True
    assert_refused(model, "checkpointing computes layers again")


def test_slopes_that_depend_on_the_length_are_those_of_this_length(tokens):
    model = decoder(alibi_scaling={"type": "linear", "train_seq_len": 8})
    seen = []
    with watched(model, lambda layer, query, key, slopes, scale: seen.append((layer, slopes))):
        model(tokens(1, 20))
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for _, slopes in seen:
        torch.testing.assert_close(slopes, torch.tensor(model.config.unstretched) / (20 / 8))
