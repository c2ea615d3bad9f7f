"""Models that people search for by name load through an existing family, with the names of their published weights."""

import pytest
import torch
from encoder_oracle import config, encode, random_state, write_folder
from transformers import MptConfig, MptForCausalLM

from alibi_attn.hf import ALiBiBertModel, ALiBiForCausalLM, patch

ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 16,
    "attn_impl": "torch",
    "attn_pdrop": 0,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": 6,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}
STORYWRITER = {
    "model_type": "mpt",
    "architectures": ["MPTForCausalLM"],
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 2,
    "expansion_ratio": 4,
    "max_seq_len": 65536,
    "vocab_size": 60,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "emb_pdrop": 0,
    "resid_pdrop": 0,
    "embedding_fraction": 1.0,
    "learned_pos_emb": True,
    "logit_scale": None,
    "attn_config": ATTENTION,
}
REPLIT = {
    "model_type": "replit_lm",
    "architectures": ["ReplitLM"],
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 2,
    "mlp_ratio": 4,
    "max_seq_len": 2048,
    "vocab_size": 60,
    "no_bias": True,
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_clip_qkv": None,
    "attn_impl": "torch",
    "attn_pdrop": 0,
    "attn_qk_ln": False,
    "attn_uses_sequence_id": False,
    "embedding_fraction": 1.0,
    "low_precision_layernorm": True,
    "prefix_lm": False,
    "resid_pdrop": 0,
    "emb_pdrop": 0,
    "softmax_scale": None,
    "logit_scale": None,
}
RENAMED = {
    ".norm_1.": ".ln_1.",
    ".norm_2.": ".ln_2.",
    "norm_f.": "ln_f.",
    ".ffn.up_": ".mlp.mlp_up_",
    ".ffn.down_": ".mlp.mlp_down_",
}


def mpt(**options: object) -> MptForCausalLM:
    sizes = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 60, "max_seq_len": 64}
    model = MptForCausalLM(MptConfig(**sizes, attn_config=options)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def weights_of(model: MptForCausalLM, names: dict[str, str]) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name.replace("_proj", "") if ".mlp." in name else name] = tensor
    del weights["lm_head.weight"]  # tied, and not stored
    return weights


@torch.no_grad()
@pytest.mark.parametrize("name", ["storywriter", "replit"])
def test_mpt_storywriter_and_replit_have_the_logits_of_mpt(name, tmp_path):
    about = {"storywriter": STORYWRITER, "replit": REPLIT}[name]
    model = mpt(alibi_bias_max=16, clip_qkv=6.0) if name == "storywriter" else mpt(alibi_bias_max=8)
    folder = write_folder(tmp_path / name, weights_of(model, RENAMED if name == "replit" else {}), about)
    found = ALiBiForCausalLM.from_pretrained(folder)
    ids = torch.randint(60, (2, 50), generator=torch.Generator().manual_seed(2))
    patch(model)  # it honors alibi_bias_max, which transformers ignores
    torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert found.config.clip_qkv == (6.0 if name == "storywriter" else None)
    assert found.config.trained_length == about["max_seq_len"]


def test_a_replit_whose_slopes_are_not_known_is_refused(tmp_path):
    folder = write_folder(tmp_path / "replit", weights_of(mpt(), RENAMED), REPLIT | {"n_heads": 6})
    with pytest.raises(ValueError, match="n_heads = 6 but only powers of two are supported: others have other slopes"):
        ALiBiForCausalLM.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("name", ["DNABERT-S", "mRNABERT"])
def test_encoders_of_nucleotides_load_as_mosaic_bert(name, tmp_path):
    """Both store a MosaicBERT with its head, under "bert."; DNABERT-S's config has no model_type."""
    state = random_state("mosaic")
    about = config("mosaic", model_type=None if name == "DNABERT-S" else "bert")
    stored = {f"bert.{key}" if key.startswith(("embeddings", "encoder")) else key: x for key, x in state.items()}
    model = ALiBiBertModel.from_pretrained(write_folder(tmp_path / name, stored, about))
    ids = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    expected = encode(state, "mosaic", ids, mask).float()
    torch.testing.assert_close(model(ids, mask).last_hidden_state[0], expected[0], rtol=1e-4, atol=1e-4)
