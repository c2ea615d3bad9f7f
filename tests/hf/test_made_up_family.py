"""A new model family is one file with its `Family` or `PatchedFamily` value, and a table row."""

import pytest
import torch
from transformers import BloomConfig, BloomModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.patching.patching import patched_as
from alibi_attn.hf.readers.checkpoint_files import read_state
from alibi_attn.hf.readers.families import ENCODERS, bloom
from alibi_attn.hf.readers.families.family import Checkpoint, Family, PatchedFamily, Source

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
IDS = torch.arange(14).reshape(2, 7)


# An encoder family that can be written, too.
def encoder_config(made_up: Checkpoint) -> ALiBiBertConfig:
    return ALiBiBertConfig(**{name: made_up.about.integer(name) for name in SIZES}, pooler=False)


ENCODER = Family(
    name="MadeUpBert",
    model_types=("made-up-bert",),
    marks=("mix.wq.weight",),
    layers="blocks.",
    own_layers="encoder.layer.",
    outside={
        "embeddings.word_embeddings": Source(("words",)),
        "embeddings.token_type_embeddings": Source(("kinds",)),
        "embeddings.LayerNorm": Source(("first_norm",)),
    },
    parts=lambda _: {"attention.self.Wqkv": Source(("mix.wq", "mix.wk", "mix.wv"))},
    heads=r"cls\..*",
    config=encoder_config,
    written=lambda model: {"model_type": "made-up-bert", **{name: getattr(model.config, name) for name in SIZES}},
)


# A model that transformers builds: BLOOM's, with scores that are scaled otherwise.
class Layer(BloomAttention):
    pass


class Model(BloomModel):
    pass


def settings(config: BloomConfig, *, backend: str, numerics: Numerics) -> AttentionSettings:
    return AttentionSettings((0.5,) * config.n_head, 0.25, backend, numerics)


PATCHED_MODEL = PatchedFamily(
    name="MadeUpBloom",
    model=Model,
    layer=Layer,
    settings=settings,
    forward=bloom.forward,
    unused={"build_alibi_tensor": bloom.no_bias},
)


@torch.no_grad()
def test_a_made_up_model_of_transformers_is_patched_and_given_back():
    model = Model(BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=30)).eval()
    model.h[0].self_attention.__class__ = Layer
    mixed = {}
    model.h[0].self_attention.dense.register_forward_pre_hook(lambda _, inputs: mixed.update(x=inputs[0]))
    before = model(IDS)[0]
    with patched_as(model, [PATCHED_MODEL], backend="reference", numerics="exact") as handle:
        assert handle.layers == ("h.0.self_attention",)
        model(IDS)
    h = model.h[0].input_layernorm(model.word_embeddings_layernorm(model.word_embeddings(IDS)))
    query, key, value = model.h[0].self_attention._reshape(model.h[0].self_attention.query_key_value(h))
    at = torch.arange(7)
    scores = 0.25 * query @ key.mT - 0.5 * (at[:, None] - at).abs()
    truth = scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(mixed["x"], truth.transpose(1, 2).flatten(2))
    assert torch.equal(model(IDS)[0], before)
    with pytest.raises(ValueError, match="has nothing to patch; supported are the whole models of MadeUpBloom"):
        patched_as(torch.nn.Linear(2, 2), [PATCHED_MODEL], backend="auto", numerics="exact")


@torch.no_grad()
def test_a_row_in_the_table_is_all_that_an_encoder_family_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(ENCODERS, "made-up", ENCODER)
    model = ALiBiBertModel(ALiBiBertConfig(**SIZES, pooler=False)).eval()
    with pytest.raises(ValueError, match=r"was not read from an original; pass 'own' or one of 'mosaic'.*'made-up'"):
        model.save_pretrained(tmp_path / "theirs", layout="original")
    model.save_pretrained(tmp_path / "theirs", layout="made-up")
    read = ALiBiBertModel.from_pretrained(tmp_path / "theirs")
    assert read.config.original_layout == "made-up"
    read.save_pretrained(tmp_path / "ours")
    read.save_pretrained(tmp_path / "again", layout="original")
    assert read_state(tmp_path / "again").keys() == read_state(tmp_path / "theirs").keys()
    assert "encoder.layer.0.attention.self.Wqkv.weight" in read_state(tmp_path / "ours")
    for folder in ("ours", "again"):
        again = ALiBiBertModel.from_pretrained(tmp_path / folder)
        assert again.config.original_layout == "made-up"
        assert torch.equal(again(IDS).last_hidden_state, model(IDS).last_hidden_state)
