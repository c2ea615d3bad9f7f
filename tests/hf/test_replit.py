"""Replit is an MPT with other names; Storywriter is an MPT, DNABERT-S and mRNABERT are MosaicBERTs, tested as such."""

import pytest
import torch
from encoder_oracle import write_folder
from torch import nn

from alibi_attn.hf import ALiBiForCausalLM, patch

SIZES = {"d_model": 48, "n_heads": 4, "n_layers": 2, "mlp_ratio": 4, "max_seq_len": 2048, "vocab_size": 60}
ON = ("no_bias", "alibi", "low_precision_layernorm")
OFF = ("attn_qk_ln", "attn_uses_sequence_id", "prefix_lm")
REPLIT = {
    "model_type": "replit_lm",
    "architectures": ["ReplitLM"],
    **SIZES,
    "alibi_bias_max": 8,
    "attn_impl": "torch",
    "embedding_fraction": 1.0,
    **dict.fromkeys(ON, True),
    **dict.fromkeys(OFF, False),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "emb_pdrop"), 0),
    **dict.fromkeys(("attn_clip_qkv", "softmax_scale", "logit_scale"), None),
}
RENAMED = {
    ".norm_1.": ".ln_1.",
    ".norm_2.": ".ln_2.",
    "norm_f.": "ln_f.",
    ".ffn.up_": ".mlp.mlp_up_",
    ".ffn.down_": ".mlp.mlp_down_",
}


def replit_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        weights[name.replace("_proj", "") if ".mlp." in name else name] = tensor
    del weights["lm_head.weight"]  # tied, and not stored
    return weights


@torch.no_grad()
def test_a_replit_has_the_logits_of_mpt(tmp_path, build, tokens):
    model, ids = build("mpt", n_heads=4), tokens(2, 50)
    found = ALiBiForCausalLM.from_pretrained(write_folder(tmp_path / "replit", replit_weights(model), REPLIT))
    patch(model)  # it honors alibi_bias_max, which transformers ignores
    torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert found.config.trained_length == REPLIT["max_seq_len"]


def test_a_replit_whose_slopes_are_not_known_is_refused(tmp_path, build):
    folder = write_folder(tmp_path / "replit", replit_weights(build("mpt")), REPLIT | {"n_heads": 6})
    with pytest.raises(ValueError, match="n_heads = 6 but only powers of two are supported: others have other slopes"):
        ALiBiForCausalLM.from_pretrained(folder)
