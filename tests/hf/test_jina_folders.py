"""ColBERT v1 and CLIP v1's text tower are Jina v2 encoders: their states equal the formulas, whatever else a folder holds."""

import json

import pytest
import torch
from encoder_oracle import HEADS, WIDTH, WORDS, config, encode, random_state, write_folder, write_tokenizer
from safetensors.torch import load_file
from torch.nn import functional as F

from alibi_attn.hf import ALiBiBertModel, sentence_transformer

pytestmark = pytest.mark.usefixtures("no_gradients")
IDS = torch.arange(36).reshape(3, 12) % WORDS
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [0] * 4 + [1] * 8])
# The names of flash-attn's BERT, whose fused matrix has the rows (3, H, D) of MosaicBERT's.
CLIP_NAMES = {
    "embeddings.LayerNorm.": "emb_ln.",
    "encoder.layer.": "encoder.layers.",
    ".attention.self.Wqkv.": ".mixer.Wqkv.",
    ".attention.output.dense.": ".mixer.out_proj.",
    ".attention.output.LayerNorm.": ".norm1.",
    ".mlp.layernorm.": ".norm2.",
}
CLIP_OTHERS = {
    "logit_scale": (1,),
    "text_projection.weight": (WIDTH, WIDTH),
    "vision_model.pos_embed": (1, 5, WIDTH),
    "vision_model.blocks.0.attn.q_proj.weight": (WIDTH, WIDTH),
}


def close(found, truth):
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def clip_names(state, prefix=""):
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in CLIP_NAMES.items():
            name = name.replace(ours, theirs)
        renamed[prefix + name] = tensor
    return renamed


def clip_config(**text):
    """The config of the published CLIP, which has no sizes."""
    kwargs = {"use_flash_attn": False, **text}
    tower = {"model_type": "jina_clip_text", "embed_dim": WIDTH, "hf_model_config_kwargs": kwargs}
    return {"model_type": "jina_clip", "text_config": tower, "vision_config": {"layers": 1}}


def clip_folder(folder, act="gelu", *, without="", **others):
    state = random_state("mosaic")
    stored = clip_names(state, "text_model.transformer.")
    stored |= {name: torch.ones(*shape) for name, shape in others.items()}
    stored.pop(without, None)
    return write_folder(folder, stored, clip_config(num_attention_heads=HEADS, hidden_act=act)), state


@pytest.mark.parametrize("act", ["gelu", "relu"])
@pytest.mark.parametrize("others", [{}, CLIP_OTHERS], ids=["tower", "whole"])
def test_hidden_states_of_clip_s_text_tower_are_those_of_the_formulas(act, others, tmp_path, caplog):
    folder, state = clip_folder(tmp_path / "clip", act, **others)
    model = ALiBiBertModel.from_pretrained(folder, dtype=torch.float64)
    close(model(IDS, MASK).last_hidden_state, encode(state, "mosaic", IDS, MASK, act=act))
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert all(name in logged for name in others)


def test_a_clip_without_a_weight_of_its_tower_is_refused_whatever_else_it_holds(tmp_path):
    missing = "encoder.layers.1.mixer.out_proj.bias"
    folder, _ = clip_folder(tmp_path / "clip", without=f"text_model.transformer.{missing}", **CLIP_OTHERS)
    with pytest.raises(
        ValueError, match=rf"not the Jina CLIP v1's text tower that .*: the weights {missing} are missing"
    ):
        ALiBiBertModel.from_pretrained(folder)


def test_the_heads_of_the_published_clip_are_known_and_those_of_others_asked_for(tmp_path):
    folder, state = clip_folder(tmp_path / "clip")
    (folder / "config.json").write_text(json.dumps(clip_config()))
    with pytest.raises(ValueError, match="has no num_attention_heads, which the tensors do not determine; add it"):
        ALiBiBertModel.from_pretrained(folder)
    wide = {name: F.pad(x, (0, 768 - WIDTH)) if x.shape[-1] == WIDTH else x for name, x in state.items()}
    rows = {WIDTH: 768, 3 * WIDTH: 3 * 768}
    for name, x in wide.items():
        if "embeddings." not in name and x.shape[0] in rows and x.ndim == 2:
            wide[name] = F.pad(x, (0, 0, 0, rows[x.shape[0]] - x.shape[0]))
        elif x.ndim == 1 and x.shape[0] in rows:
            wide[name] = F.pad(x, (0, rows[x.shape[0]] - x.shape[0]))
    write_folder(folder, clip_names(wide, "text_model.transformer."), clip_config())
    assert ALiBiBertModel.from_pretrained(folder).config.num_attention_heads == 12


def test_a_text_tower_is_written_and_read_back(tmp_path):
    folder, state = clip_folder(tmp_path / "clip", **CLIP_OTHERS)
    model = ALiBiBertModel.from_pretrained(folder)
    assert model.config.original_layout == "jina-clip"
    model.save_pretrained(tmp_path / "tower", layout="original")
    written = load_file(tmp_path / "tower" / "model.safetensors")
    assert written.keys() == clip_names(state).keys()
    assert all(torch.equal(written[name], x) for name, x in clip_names(state).items())
    model.save_pretrained(tmp_path / "jina", layout="jina")
    for name in ("tower", "jina"):
        again = ALiBiBertModel.from_pretrained(tmp_path / name)
        assert torch.equal(again(IDS).last_hidden_state, model(IDS).last_hidden_state)


def colbert(folder, **more):
    state = random_state("jina", prefix="bert.")
    state["linear.weight"] = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(4))
    state |= {name: torch.ones(*shape) for name, shape in more.items()}
    about = config("jina", architectures=["HF_ColBERT"])
    return write_tokenizer(write_folder(folder, state, about)), {
        name.removeprefix("bert."): x for name, x in state.items()
    }


def test_a_colbert_is_written_back_without_its_head(tmp_path):
    folder, state = colbert(tmp_path / "colbert")
    ALiBiBertModel.from_pretrained(folder).save_pretrained(tmp_path / "jina", layout="original")
    written = load_file(tmp_path / "jina" / "model.safetensors")
    assert written.keys() == state.keys() - {"linear.weight"}
    assert all(torch.equal(x, state[name]) for name, x in written.items())


def test_sentence_transformer_says_what_a_colbert_is(tmp_path):
    folder, _ = colbert(tmp_path / "colbert")
    message = r"is a ColBERT, which makes one vector per token, not one per text; load it with ALiBiBertModel, .*linear\.weight"
    with pytest.raises(ValueError, match=message):
        sentence_transformer(folder)
    (folder / "config.json").write_text(json.dumps(config("jina")))
    (folder / "artifact.metadata").write_text("{}")
    with pytest.raises(ValueError, match=message):
        sentence_transformer(folder)
