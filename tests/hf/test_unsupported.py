"""The errors of `patch` for models without usable ALiBi, or with remote code, name the class to load instead."""

import pytest
import torch
from encoder_oracle import config, random_state, write_folder
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel, patch
from alibi_attn.hf.readers.checkpoint_files import read_state

SMALL = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 40, "vocab_size": 40}
SIGNS = {
    "position_embedding_type": ("alibi", "position_embedding_type 'alibi'"),
    "alibi_starting_size": (512, "alibi_starting_size"),
    "feed_forward_type": ("reglu", "feed_forward_type 'reglu'"),
    "auto_map": (
        {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
        "auto_map names a family",
    ),
    "name_or_path": ("zhihan1996/DNABERT-2-117M", "its name is that of a family"),
}


@pytest.mark.parametrize(("field", "value", "sign"), [(field, *rest) for field, rest in SIGNS.items()])
def test_a_plain_bert_whose_config_says_alibi_is_refused(field, value, sign):
    model = BertModel(BertConfig(**SMALL, **{field: value}))
    with pytest.raises(ValueError, match=rf"was loaded without ALiBi: .*{sign}.*ALiBiBertModel\.from_pretrained"):
        patch(model)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (BertForMaskedLM, "ALiBiBertForMaskedLM"),
        (BertForSequenceClassification, "ALiBiBertForSequenceClassification"),
        (BertForTokenClassification, "ALiBiBertForTokenClassification"),
        (BertForQuestionAnswering, "ALiBiBertForQuestionAnswering"),
        (BertForNextSentencePrediction, "ALiBiBertModel"),
    ],
)
def test_the_error_for_a_head_names_its_class(kind, instead):
    with pytest.raises(ValueError, match=rf"use alibi_attn\.hf\.{instead}\.from_pretrained\('folder_or_id'\)"):
        patch(kind(BertConfig(**SMALL, alibi_starting_size=512)))


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layout", ["mosaic", "jina", "jina-code"])
def test_weights_identify_a_model_whose_config_does_not(layout, pickled, tmp_path):
    silent = dict.fromkeys(("auto_map", "alibi_starting_size", "position_embedding_type", "feed_forward_type"))
    state = random_state(layout, prefix="bert.")
    folder = write_folder(tmp_path / "model", state, config(layout, **silent), pickled=pickled)
    assert read_state(folder, data=False).keys() == state.keys()
    model = BertModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"without ALiBi: the weights in .*have the names") as raised:
        patch(model)
    assert repr(str(folder)) in str(raised.value)


def test_a_bert_that_never_had_alibi_is_only_not_supported(tmp_path):
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    for model in (BertModel(BertConfig(**SMALL)), BertModel.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="BertModel has nothing to patch"):
            patch(model)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")  # which patch has no business with
    with pytest.raises(ValueError, match="BertModel has nothing to patch"):
        patch(model)


REMOTE = {
    "JinaBertModel": "alibi_attn.hf.ALiBiBertModel",
    "JinaBertForMaskedLM": "alibi_attn.hf.ALiBiBertForMaskedLM",
    "BaichuanForCausalLM": "alibi_attn.hf.ALiBiForCausalLM",
    "BaiChuanForCausalLM": "alibi_attn.hf.ALiBiForCausalLM",
    "BTLMLMHeadModel": "alibi_attn.hf.ALiBiForCausalLM",
    "JAISLMHeadModel": "alibi_attn.hf.ALiBiForCausalLM",
    "MPTForCausalLM": "alibi_attn.hf.ALiBiForCausalLM",
    "RWForCausalLM": "transformers.FalconForCausalLM",
}


def remote(name: str, *inside: nn.Module) -> nn.Module:
    """A module as transformers loads it with trust_remote_code."""
    made = type(name, (nn.Module,), {"__module__": "transformers_modules.owner.repository.modeling"})()
    for at, module in enumerate(inside):
        made.add_module(str(at), module)
    return made


@pytest.mark.parametrize(("name", "instead"), REMOTE.items())
def test_the_error_for_remote_code_names_the_class_to_use(name, instead):
    with pytest.raises(ValueError, match=rf"{name} is remote code, .*; use {instead}\.from_pretrained"):
        patch(remote(name))


def test_mosaicbert_s_remote_bert_is_known_by_its_layers():
    model = remote("BertForSequenceClassification", remote("BertModel", remote("BertUnpadSelfAttention")))
    with pytest.raises(ValueError, match=r"use alibi_attn\.hf\.ALiBiBertForSequenceClassification\.from_pretrained"):
        patch(model)
    with pytest.raises(ValueError, match="BertModel has nothing to patch"):
        patch(remote("BertModel", nn.Linear(2, 2)))


def test_our_own_encoder_needs_no_patch():
    with torch.device("meta"):
        model = ALiBiBertModel(ALiBiBertConfig(**SMALL))
    with pytest.raises(ValueError, match="computes its attention with alibi_attention already"):
        patch(model)
