"""Each architecture equals another library's model with the same weights, and has its paper's size."""

import math

import pytest
import torch
from torch import nn

from alibi_attn.hf.readers.export import DecoderConfig, export_mpt
from alibi_lab.lab.config import ConfigError, ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel, decoder_state

PAPER = ModelConfig(  # Baevski and Auli 2019, sec. 4.2; fairseq's transformer_lm_wiki103
    architecture="baevski-auli",
    vocab_size=267_744,
    num_layers=16,
    num_heads=8,
    embed_dim=1024,
    ffn_dim=4096,
    cutoffs=(20_000, 60_000),
    dropout=0.3,
    attention_dropout=0.1,
    activation_dropout=0.1,
    softmax_dropout=0.2,
)


def test_baevski_auli_is_torch_s_transformer_with_the_norm_first(tiny_model):
    model = tiny_model("none", architecture="baevski-auli")
    for parameter in model.parameters():  # biases and norms as well
        nn.init.normal_(parameter, std=0.3)
    x = model.embedding(tokens := torch.randint(64, (2, 11))) * math.sqrt(16)
    for block in model.blocks:
        theirs = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "relu", batch_first=True, norm_first=True).eval()
        parts = (block.q, block.k, block.v)
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([part.weight for part in parts]),
                "self_attn.in_proj_bias": torch.cat([part.bias for part in parts]),
                "self_attn.out_proj.weight": block.attention_out.weight,
                "self_attn.out_proj.bias": block.attention_out.bias,
                "linear1.weight": block.ffn_in.weight,
                "linear1.bias": block.ffn_in.bias,
                "linear2.weight": block.ffn_out.weight,
                "linear2.bias": block.ffn_out.bias,
                "norm1.weight": block.attention_norm.weight,
                "norm1.bias": block.attention_norm.bias,
                "norm2.weight": block.ffn_norm.weight,
                "norm2.bias": block.ffn_norm.bias,
            }
        )
        future = nn.Transformer.generate_square_subsequent_mask(11)
        x = theirs(x, src_mask=future, is_causal=True)
    torch.testing.assert_close(model(tokens), x @ model.embedding.weight.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_exported_mpt_has_equal_logits(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokens = tiny_model("alibi", architecture="mpt", num_heads=4, ffn_dim=64), torch.randint(64, (2, 16))
    folder = export_mpt(decoder_state(model), DecoderConfig(num_heads=4, trained_length=16), tmp_path / "mpt")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "architecture"), [("alibi", "modern"), ("rotary", "mpt"), ("alibi-half", "mpt")])
def test_models_that_mpt_cannot_express_are_not_exported_as_mpt(tiny_model, method, architecture):
    with pytest.raises(ConfigError, match=f"{architecture}.*{method}.*--set model.architecture=mpt"):
        decoder_state(tiny_model(method, architecture=architecture))


def test_the_paper_s_models_are_as_large_as_it_says():
    with torch.device("meta"):
        wikitext = LanguageModel(PAPER, trained_length=512)
        web = LanguageModel(
            ModelConfig(  # sec. 4.3: 25 layers, 2048 wide, 16 heads, 8192 inside; a vocabulary of RoBERTa's size
                architecture="baevski-auli",
                vocab_size=50_265,
                num_layers=25,
                num_heads=16,
                embed_dim=2048,
                ffn_dim=8192,
            ),
            trained_length=512,
        )
    layers = 16 * (4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024)
    tables = 20_000 * 1024 + 40_000 * 256 + 207_744 * 64
    matrices = 1024 * 1024 + 256 * 1024 + 64 * 1024 + 2 * 1024
    assert wikitext.num_parameters() == layers + tables + matrices == 246_933_504  # "247M"
    layers = 25 * (4 * (2048 * 2048 + 2048) + 2 * 2048 * 8192 + 8192 + 2048 + 4 * 2048)
    assert web.num_parameters() == layers + 50_265 * 2048 == 1_361_899_520  # "1.3B": 1.26 without the embeddings


def test_the_paper_s_model_starts_as_fairseq_s():
    model = LanguageModel(
        ModelConfig(
            architecture="baevski-auli", vocab_size=4000, num_layers=1, embed_dim=64, ffn_dim=256, cutoffs=(1000, 2000)
        ),
        trained_length=16,
    )
    block = model.blocks[0]
    for weight, bound in (
        (block.q.weight, math.sqrt(6 / 128) / math.sqrt(2)),  # Glorot's range, √(6/(in + out)), times 1/√2
        (block.attention_out.weight, math.sqrt(6 / 128)),
        (block.ffn_in.weight, math.sqrt(6 / 320)),
        (model.embedding.widen[2].weight, math.sqrt(6 / 68)),
    ):
        assert 0.97 * bound < float(weight.detach().abs().max()) <= bound
        assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.06)
    for table, width in zip(model.embedding.tables, (64, 16, 4), strict=True):
        assert float(table.weight.detach().std()) == pytest.approx(width**-0.5, rel=0.03)
    assert all(not weight.any() for name, weight in model.named_parameters() if name.endswith(".bias"))
