"""`alibi export`: an MPT folder with equal logits and the tokenizer; `tests/hf/test_export.py` imports it back."""

from pathlib import Path

import pytest
import torch
from commands import alibi
from transformers import AutoModelForCausalLM, AutoTokenizer

from alibi_lab.lab.config import DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig
from alibi_lab.lab.data.tokenizing import make_tokenizer
from alibi_lab.lab.training.checkpoint import Progress, load_checkpoint, load_checkpoint_tokenizer, save_checkpoint
from alibi_lab.lab.training.parallel import prepare

SIZES = {"num_layers": 2, "num_heads": 2, "embed_dim": 16, "ffn_dim": 40, "vocab_size": 300}
VERSES = "ten bottles of beer on the wall, ten bottles of beer.\n" * 9


def saved(folder: Path, *, tokenizer: str = "bytes", **model: object) -> Path:
    """A checkpoint of an untrained model with slightly changed weights, as the lab writes it."""
    config = RunConfig(
        model=ModelConfig(**{**SIZES, **model}),
        data=DataConfig(tokenizer=tokenizer),
        train=TrainConfig(length=16, batch_tokens=64, steps=1),
        eval=EvalConfig(lengths=(16,)),
    )
    training = prepare(config)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    made = make_tokenizer(tokenizer, lambda: iter([VERSES.encode()]), len(VERSES))
    return save_checkpoint(folder, training, Progress(step=1), made)


@torch.no_grad()
def test_an_exported_checkpoint_has_equal_logits(tmp_path):
    step = saved(tmp_path / "run", architecture="mpt")
    assert alibi("export", step.parent, tmp_path / "mpt") == f"mpt  {tmp_path / 'mpt'}\n"
    model, _ = load_checkpoint(step)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mpt").eval()
    ids = torch.randint(300, (2, 16))
    torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_the_tokenizer_is_exported_too(tmp_path, name):
    step = saved(tmp_path / "run", architecture="mpt", tokenizer=name)
    alibi("export", step, tmp_path / "mpt")
    ours, theirs = load_checkpoint_tokenizer(step), AutoTokenizer.from_pretrained(tmp_path / "mpt")
    text = "beer of the wall\n  é"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.decode(theirs(text)["input_ids"]) == text


@pytest.mark.parametrize("model", [{"architecture": "modern"}, {"architecture": "mpt", "method": "rotary"}])
def test_a_model_that_is_not_an_mpt_is_refused_with_the_settings_to_train(tmp_path, model):
    step = saved(tmp_path / "run", **model)
    refusal = alibi("export", step, tmp_path / "mpt", code=1)
    assert "train one with --set model.architecture=mpt --set model.method=alibi" in refusal
    assert not (tmp_path / "mpt").exists()
