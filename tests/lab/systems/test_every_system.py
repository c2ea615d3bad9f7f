"""Facts that hold for every system: causality, caches, segments, documents, gradients, and texts beyond the trained length."""

import pytest
import torch
from torch import Tensor

from alibi_lab.lab.config import ConfigError, EvalConfig, ModelConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.model.generation import generate
from alibi_lab.lab.model.method_checks import imported_method
from alibi_lab.recipes.systems import SYSTEMS

SEGMENTED = [system for system in SYSTEMS if imported_method(system)(ModelConfig(), 16).segment]
in_segments = pytest.mark.parametrize("method", SEGMENTED)


def some_tokens(length: int) -> Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))


@in_segments
def test_a_system_with_segments_refuses_a_cache(tiny_model, method):
    with pytest.raises(ConfigError, match="reads texts in segments of 8 tokens"):
        next(generate(tiny_model(method), [1, 2, 3], max_new_tokens=1))


@in_segments
def test_a_prefix_reads_the_same_segments_as_the_whole_text(tiny_model, method):
    model, tokens = tiny_model(method), some_tokens(40)
    with torch.no_grad():
        whole = model(tokens)
        for length in (1, 7, 8, 9, 30):
            torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length], rtol=1e-4, atol=1e-5)


@in_segments
def test_recurrence_reaches_one_segment_further_per_layer(tiny_model, method):
    """Two layers, segments and memory of 8 tokens: token 24 sees back to token 16, whose layer below saw back to token 8."""
    model, tokens = tiny_model(method), some_tokens(32)
    with torch.no_grad():
        last = model(tokens)[:, 24]
        for position, reaches in ((7, False), (8, True), (15, True), (16, True)):
            changed = tokens.clone()
            changed[:, position] = (changed[:, position] + 1) % 64
            assert bool(((model(changed)[:, 24] - last).abs().amax(-1) > 1e-6).all()) is reaches, position


@in_segments
def test_without_a_memory_segments_are_separate_texts(tiny_model, method):
    model, tokens = tiny_model(method), some_tokens(24)
    with torch.no_grad():
        remembered = model(tokens)
        model.position.memory = 0
        forgotten = model(tokens)
        alone = torch.cat([model(part) for part in tokens.split(8, dim=1)], dim=1)
    torch.testing.assert_close(forgotten, alone, rtol=1e-5, atol=1e-6)
    assert ((remembered - forgotten)[:, 8:].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("method", SYSTEMS)
def test_every_layer_s_own_parameters_get_a_gradient(tiny_model, method):
    model, tokens = tiny_model(method).train(), some_tokens(17)
    model(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        by_layer = parameter.grad.flatten(1) if parameter.ndim > 2 else parameter.grad.flatten()[None]
        assert (by_layer != 0).any(1).all(), name


def test_transformer_xl_records_its_loss_by_the_length_of_the_memory(tiny_model):
    model, text = tiny_model("alibi_lab.lab.systems.transformer_xl:TransformerXL"), some_tokens(200)[0].int()
    corpus, config = Corpus(text, text, {}), EvalConfig(lengths=(16, 32), tokens=64)
    curve = type(model.position).curves(model, corpus, config)["memory"]
    assert curve["memory"] == [0, 8, 16, 32, 64, 128]
    assert curve["tokens"] == [32] * 6
    odd = type(model.position).curves(model, corpus, EvalConfig(lengths=(33,), tokens=66))["memory"]
    assert odd["tokens"] == [2 * 16] * 6  # what follows the first 17 inputs
    rows = torch.stack([text[:33], text[167:]]).long()
    with torch.no_grad():
        trained = model(rows[:, :-1], targets=rows[:, 17:]).double().mean()
        model.position.memory = 32  # all of the 32 tokens: one more cannot change anything
        whole = model(rows[:, :-1], targets=rows[:, 17:]).double().mean()
    assert curve["nats"][1] == pytest.approx(float(trained))
    assert curve["nats"][3:] == pytest.approx([float(whole)] * 3)
    assert len({round(nats, 6) for nats in curve["nats"]}) > 3
