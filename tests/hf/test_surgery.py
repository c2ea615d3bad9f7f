"""`to_alibi`: a GPT-2, BERT or RoBERTa with ALiBi instead of positions, compared with transformers."""

import copy
import functools

import pytest
import torch
from encoder_oracle import slopes
from refusals import assert_refused
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)

from alibi_attn.hf import ALiBiBertModel, ALiBiForCausalLM, to_alibi

pytestmark = pytest.mark.usefixtures("no_gradients")

LENGTH, HEADS = 24, 6
GPT2 = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": HEADS,
    "vocab_size": 60,
    "n_positions": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 56,
    "vocab_size": 60,
    "max_position_embeddings": LENGTH + 2,
}
KINDS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "gpt2-scaled": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            **GPT2,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    "bert": (BertModel, BertConfig, BERT),
    "bert-masked": (BertForMaskedLM, BertConfig, {**BERT, "hidden_act": "gelu_new"}),
    "bert-labels": (BertForSequenceClassification, BertConfig, {**BERT, "num_labels": 3}),
    "roberta": (RobertaModel, RobertaConfig, BERT),
    "roberta-masked": (RobertaForMaskedLM, RobertaConfig, {**BERT, "hidden_act": "silu", "tie_word_embeddings": False}),
    "roberta-labels": (RobertaForSequenceClassification, RobertaConfig, {**BERT, "num_labels": 3}),
}
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def build(name: str, **fields: object):
    """A model of transformers, with no weight near zero, that computes every score."""
    kind, config, sizes = KINDS[name]
    model = kind(config(**{**sizes, **fields}, attn_implementation="eager")).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def without_positions(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The original with its table of positions zeroed, and scores −m·|i − j| through transformers' own 4-D mask."""
    causal, original = isinstance(model, GPT2LMHeadModel), copy.deepcopy(model)
    for name, parameter in original.named_parameters():
        if name.endswith(("wpe.weight", "position_embeddings.weight")):
            parameter.zero_()
    at = torch.arange(ids.shape[1])
    seen = mask[:, None, None, :].bool() & (at[:, None] >= at if causal else torch.ones(1, 1, dtype=torch.bool))
    bias = -torch.tensor(slopes(HEADS))[:, None, None] * (at[:, None] - at).abs()
    scores = torch.where(seen, bias, torch.finfo(torch.float32).min)
    output = original(ids, attention_mask=scores)
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_original_with_a_bias_instead_of_positions(name):
    model = build(name)
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    expected, output = without_positions(model, ids, mask), to_alibi(model)(ids, mask)
    found = output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits
    shown = mask.bool() if expected.ndim == 3 else slice(None)
    close(found[shown], expected[shown])
    assert (expected - model(ids, attention_mask=mask)[0])[0].abs().max() > 1e-3  # positions did matter


@pytest.mark.parametrize("name", KINDS)
def test_the_old_model_stays_and_the_new_one_loads_again(name, tmp_path):
    model = build(name)
    before = copy.deepcopy(model.state_dict())
    new = to_alibi(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    ids = torch.randint(3, 60, (1, 8 * LENGTH), generator=torch.Generator().manual_seed(3))
    expected = new(ids)[0]
    for parameter in model.parameters():
        parameter.fill_(9.0)
    close(new(ids)[0], expected, rtol=0, atol=0)
    new.save_pretrained(tmp_path / "new")
    again = type(new).from_pretrained(tmp_path / "new").eval()
    close(again(ids)[0], expected, rtol=0, atol=0)
    if type(new) in (ALiBiBertModel, ALiBiForCausalLM):
        close(AutoModel.from_pretrained(tmp_path / "new").eval()(ids)[0], expected, rtol=0, atol=0)


def test_dtype_mode_ties_and_generation_are_kept():
    model = build("gpt2").to(torch.bfloat16).train()
    model.generation_config.max_new_tokens = 5
    new = to_alibi(model)
    assert new.training
    assert new.dtype == torch.bfloat16
    assert new.lm_head.weight is new.embed_tokens.weight
    assert new.eval().generate(torch.ones(1, 90, dtype=torch.int64), pad_token_id=0, eos_token_id=None).shape == (1, 95)
    apart = to_alibi(build("roberta-masked"))
    assert apart.cls.predictions.decoder.weight is not apart.bert.embeddings.word_embeddings.weight
    assert apart.config.max_position_embeddings == LENGTH


@torch.enable_grad()
def test_all_parameters_of_a_converted_model_train():
    for name in ("gpt2", "bert-masked"):
        new = to_alibi(build(name).train())
        ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(4))
        new(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in new.parameters())


def test_unsupported_models_are_refused_with_the_reason(tmp_path):
    pretraining, silent = BertForPreTraining(BertConfig(**BERT)), build("bert", position_embedding_type="alibi")
    ours, adapted, crossed = to_alibi(build("bert")), build("gpt2"), build("gpt2", add_cross_attention=True)
    adapted.transformer.h[0].mlp.adapter = nn.Linear(2, 2)
    assert_refused(
        ("got a BertForPreTraining; load the checkpoint as one of GPT2LMHeadModel", lambda: to_alibi(pretraining)),
        ("there is nothing to patch", lambda: to_alibi(ours)),
        error=TypeError,
    )
    assert_refused(
        ("loaded without ALiBi: its config has position_embedding_type 'alibi'", lambda: to_alibi(silent)),
        ("add_cross_attention=True", lambda: to_alibi(crossed)),
        (r"than its class.*h\.0\.mlp\.adapter\.bias.*merge adapters", lambda: to_alibi(adapted)),
        ("weights are on meta but must be on one device", lambda: to_alibi(build("gpt2").to("meta"))),
        (r"'mosaic' has no names .*gated=False", lambda: ours.save_pretrained(tmp_path / "out", layout="mosaic")),
    )
