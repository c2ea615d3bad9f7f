"""A new model family is one file with its `Family` value and a table row; here the table is an argument."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from encoder_oracle import write_folder
from torch import Tensor
from transformers import BloomConfig, BloomModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel, ALiBiCausalLMConfig, ALiBiForCausalLM
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.patching.patching import patched_as
from alibi_attn.hf.readers import checkpoint
from alibi_attn.hf.readers.checkpoint_files import read_config, read_state
from alibi_attn.hf.readers.families import DECODERS, ENCODERS, bloom
from alibi_attn.hf.readers.families.family import Checkpoint, Family, PatchedFamily, Source

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
IDS = torch.arange(14).reshape(2, 7)


# A decoder family, as its file in `families/` would say it.
def decoder_config(made_up: Checkpoint) -> ALiBiCausalLMConfig:
    return ALiBiCausalLMConfig(
        vocab_size=made_up.about.integer("words"),
        hidden_size=made_up.about.integer("width"),
        num_hidden_layers=made_up.about.integer("depth"),
        num_attention_heads=made_up.about.integer("heads"),
        intermediate_size=made_up.about.integer("inner"),
    )


DECODER = Family(
    name="MadeUp",
    model_types=("made-up",),
    marks=("mixer.qkv.weight",),
    layers="net.stage.",
    body="net.",
    outside={"embed_tokens": Source(("net.words",)), "norm": Source(("net.last",)), "lm_head": Source(("head",))},
    parts=lambda _: {
        "attention_norm": Source(("before",)),
        "attention.qkv_proj": Source(("mixer.qkv",), transposed=True),
        "attention.out_proj": Source(("mixer.out",)),
        "ffn_norm": Source(("after",)),
        "ffn.gate_proj": Source(("mlp.both",), half=0),
        "ffn.up_proj": Source(("mlp.both",), half=1),
        "ffn.down_proj": Source(("mlp.down",)),
    },
    ignored=r"net\.clock",
    config=decoder_config,
)


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


def loaded(folder: Path, kind: type[torch.nn.Module], families: Iterable[Family]) -> torch.nn.Module:
    config, state = checkpoint.read(folder, read_config(folder), read_state(folder), families)
    model = kind(config).eval()
    model.load_state_dict(checkpoint.converted(model, state))
    return model


def decoder_folder(folder: Path, model: ALiBiForCausalLM, **others: Tensor) -> Path:
    ours, theirs = model.state_dict(), dict(others)
    outside = {"embed_tokens": "net.words", "norm": "net.last", "lm_head": "head"}
    parts = {
        "attention_norm": "before",
        "attention.out_proj": "mixer.out",
        "ffn_norm": "after",
        "ffn.down_proj": "mlp.down",
    }
    theirs |= {f"{name}.weight": ours[f"{own}.weight"] for own, name in outside.items()}
    for n in range(2):
        theirs |= {f"net.stage.{n}.{name}.weight": ours[f"layers.{n}.{own}.weight"] for own, name in parts.items()}
        theirs[f"net.stage.{n}.mixer.qkv.weight"] = ours[f"layers.{n}.attention.qkv_proj.weight"].mT
        both = [ours[f"layers.{n}.ffn.{part}_proj.weight"] for part in ("gate", "up")]
        theirs[f"net.stage.{n}.mlp.both.weight"] = torch.cat(both)
    about = dict(zip(("words", "width", "depth", "heads", "inner"), SIZES.values(), strict=True))
    return write_folder(folder, theirs, {"model_type": "made-up", **about})


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
def test_a_made_up_decoder_family_is_read_and_refused_as_the_others(tmp_path):
    model = ALiBiForCausalLM(ALiBiCausalLMConfig(**SIZES)).eval()
    families = (*DECODERS, DECODER)
    folder = decoder_folder(tmp_path / "whole", model, **{"net.clock": torch.zeros(3, dtype=torch.long)})
    assert torch.equal(loaded(folder, ALiBiForCausalLM, families)(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="does not hold a checkpoint of Baichuan-13B"):
        ALiBiForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"is not the MadeUp that its config describes: it has unexpected weights net\.more"
    ):
        loaded(decoder_folder(tmp_path / "more", model, **{"net.more": torch.zeros(3)}), ALiBiForCausalLM, families)


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
