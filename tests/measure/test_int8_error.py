"""The int8 copy has int8 layers and the original none; errors are those of a loop; equal models have none."""

import math

import pytest
import torch

from alibi_attn.nn import quantized
from alibi_attn.nn.quantized import QuantizedLinear
from alibi_lab.lab.config import ModelConfig, RunConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.measure.int8_error import compared, converted, int8_error

try:
    quantized.check_supported()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)


def decoder() -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(method="alibi", num_layers=2, num_heads=2, embed_dim=32, ffn_dim=48)
    return LanguageModel(config, trained_length=16).eval()


def test_errors_are_those_of_a_loop_over_tokens() -> None:
    model, tokens = decoder(), torch.arange(65) * 7 % 256
    small = converted(model)
    assert sum(isinstance(part, QuantizedLinear) for part in small.modules()) == 2 * 7
    assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
    found = compared(model, small, tokens, length=16, pieces=4)
    losses, squares, norms = {model: [], small: []}, 0.0, 0.0
    for start in range(0, 64, 16):
        logits = {}
        for each in losses:
            with torch.no_grad():
                logits[each] = each(tokens[None, start : start + 16])[0].double()
            for at, row in enumerate(logits[each]):
                losses[each].append(float(row.logsumexp(0) - row[tokens[start + at + 1]]))
        for one, other in zip(logits[model], logits[small], strict=True):
            squares += float((other - other.mean() - one + one.mean()).square().sum())
            norms += float((one - one.mean()).square().sum())
    assert found["logits_error"] == pytest.approx(math.sqrt(squares / norms), rel=1e-4)
    assert 0 < found["logits_error"] < 0.05
    ratio = math.exp(sum(losses[small]) / 64 - sum(losses[model]) / 64)
    assert found["perplexity_change_percent"] == pytest.approx(100 * (ratio - 1), abs=1e-4)
    low, high = found["perplexity_change_percent_low"], found["perplexity_change_percent_high"]
    assert low < found["perplexity_change_percent"] < high


def test_equal_models_have_no_error() -> None:
    model = decoder()
    found = compared(model, model, torch.arange(65) * 7 % 256, length=16, pieces=4)
    assert found["logits_error"] == found["perplexity_change_percent"] == 0
    assert found["logits_worst_cosine"] == pytest.approx(1)


def test_a_missing_checkpoint_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="pass --checkpoint"):
        int8_error(tmp_path)


def test_a_text_that_is_too_short_is_told_from_a_limit_that_is_too_low(tmp_path, monkeypatch) -> None:
    module, corpus = "alibi_lab.measure.int8_error", Corpus(torch.zeros(0), torch.zeros(1000), facts={})
    monkeypatch.setattr(f"{module}.step_folder", lambda folder: folder)
    monkeypatch.setattr(f"{module}.load_checkpoint", lambda folder: (None, RunConfig()))
    monkeypatch.setattr(f"{module}.stored_tokens", lambda folder: None)
    monkeypatch.setattr(f"{module}.load_corpus", lambda *_: corpus)
    for limit, available in ((600, 600), (32_768, 999)):
        words = rf"{available} tokens can be tested \(--tokens is {limit}, the held-out text has 1000\) but two pieces of 512"
        with pytest.raises(ValueError, match=words):
            int8_error(tmp_path, checkpoint=tmp_path, tokens=limit)
