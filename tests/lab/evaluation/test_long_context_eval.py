"""Cached segments and attention sinks, compared with plain loops: one token, one row, one layer at a time."""

import pytest
import torch

from alibi_lab.lab.config import ConfigError, EvalConfig, ModelConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.evaluation.evaluate import all_curves, attention_sinks, cached_segments, nonoverlapping, streams
from alibi_lab.lab.model.language_model import LanguageModel

TEXT = torch.randint(64, (150,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
STRETCHES = [range(40, 60), range(120, 140)]
SMALL = {"vocab_size": 64, "num_heads": 2, "embed_dim": 16, "ffn_dim": 24}


def made(method: str, layers: int = 1, **fields: float) -> LanguageModel:
    config = ModelConfig(method=method, num_layers=layers, **SMALL, **fields)
    return LanguageModel(config, trained_length=16, seed=3).eval()


def loss_of(model: LanguageModel, row: torch.Tensor, target: int) -> torch.Tensor:
    with torch.no_grad():
        return -model(row.long()[None])[0, -1].log_softmax(-1)[int(TEXT[target])]


@pytest.mark.parametrize("method", ["none", "alibi", "t5", "kerple", "rotary", "fox"])
@pytest.mark.parametrize(("length", "memory"), [(7, 5), (5, 10), (10, 3)])
def test_in_one_layer_a_segment_sees_itself_and_the_tokens_before_it(method: str, length: int, memory: int) -> None:
    """Keys of the first layer depend only on their token, so memory equals a truncated text."""
    model = made(method)
    losses = cached_segments(model, TEXT, STRETCHES, length=length, memory=memory)
    assert losses.target.tolist() == [target for stretch in STRETCHES for target in stretch]
    for target, loss in zip(losses.target.tolist(), losses.loss_nats, strict=True):
        stretch = next(stretch for stretch in STRETCHES if target in stretch)
        segment = stretch.start - 1 + (target - stretch.start) // length * length
        torch.testing.assert_close(loss, loss_of(model, TEXT[segment - memory : target], target), rtol=1e-4, atol=1e-5)


def test_in_two_layers_memory_is_what_its_own_segment_made_of_it() -> None:
    """The published recurrence, in hidden states: a layer's keys come from its cached inputs."""
    model, length, memory = made("alibi", layers=2), 5, 10
    losses = cached_segments(model, TEXT, [STRETCHES[0]], length=length, memory=memory)
    kept: list[torch.Tensor] = [torch.empty(0, 16)] * 2
    found = []
    with torch.no_grad():
        for begin in range(39 - 10, 59, length):
            x = model.embedding(TEXT[begin : begin + length].long()) * 4.0  # √16
            for layer, block in enumerate(model.blocks):
                inputs = torch.cat([kept[layer], x])
                kept[layer] = inputs[-memory:]
                x = x + _attended(model, block, inputs, len(x))
                y = block.ffn_norm(x)
                x = x + block.ffn_out(block.activation(block.ffn_gate(y)) * block.ffn_in(y))
            logits = model.norm(x) @ model.embedding.weight.T
            targets = TEXT[begin + 1 : begin + length + 1].long()
            found += (-logits.log_softmax(-1)[torch.arange(length), targets]).tolist()
    torch.testing.assert_close(losses.loss_nats, torch.tensor(found[10:]), rtol=1e-4, atol=1e-5)


def _attended(model: LanguageModel, block: torch.nn.Module, inputs: torch.Tensor, queries: int) -> torch.Tensor:
    y = block.attention_norm(inputs)
    heads = []
    first = len(inputs) - queries
    for head, slope in enumerate(model.position.slopes.tolist()):
        part = slice(8 * head, 8 * head + 8)
        q, k, v = (linear(y)[:, part] for linear in (block.q, block.k, block.v))
        rows = []
        for i in range(first, len(inputs)):
            scores = torch.stack([q[i] @ k[j] / 8**0.5 - slope * (i - j) for j in range(i + 1)])
            rows.append(scores.softmax(0) @ v[: i + 1])
        heads.append(torch.stack(rows))
    return block.attention_out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("method", ["sinusoidal", "alibi", "rotary", "tisa", "nope-window"])
def test_without_memory_segments_are_nonoverlapping_and_with_all_of_it_one_pass(method: str) -> None:
    model = made(method, layers=2)
    none = cached_segments(model, TEXT, STRETCHES, length=5, memory=0)
    if method != "sinusoidal":  # its positions continue across segments
        straight = nonoverlapping(model, TEXT, STRETCHES, length=5, batch_tokens=64)
        torch.testing.assert_close(none.loss_nats, straight.loss_nats, rtol=1e-4, atol=1e-5)
    every = cached_segments(model, TEXT, [range(31, 71)], length=10, memory=30)
    with torch.no_grad():
        row = TEXT[:71].long()[None]
        whole = model(row[:, :40], targets=row[:, 1:41])[0, 30:]
    torch.testing.assert_close(every.loss_nats[:10], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["none", "alibi", "alibi-learned", "t5", "kerple", "sandwich"])
@pytest.mark.parametrize(("window", "sinks"), [(12, 4), (8, 0), (9, 1)])
def test_sinks_are_adjacent_to_the_window(method: str, window: int, sinks: int) -> None:
    model = made(method)
    losses = attention_sinks(model, TEXT, STRETCHES, window=window, sinks=sinks)
    for target, position, loss in zip(losses.target.tolist(), losses.position.tolist(), losses.loss_nats, strict=True):
        stretch = next(stretch for stretch in STRETCHES if target in stretch)
        begin = stretch.start - window
        assert position == target - begin
        row = torch.cat([TEXT[begin : begin + sinks], TEXT[target - (window - sinks) : target]])
        torch.testing.assert_close(loss, loss_of(model, row, target), rtol=1e-4, atol=1e-5)


def test_the_checker_fails_for_a_window_that_is_off_by_one() -> None:
    model = made("alibi")
    losses = attention_sinks(model, TEXT, STRETCHES, window=9, sinks=1)
    row = torch.cat([TEXT[31:32], TEXT[50 - 7 : 50]])  # seven tokens instead of eight
    assert abs(losses.loss_nats[10] - loss_of(model, row, 50)) > 1e-4


@pytest.mark.parametrize("method", ["rotary", "sinusoidal", "fire", "fox"])
def test_sinks_refuse_positions_that_cannot_move(method: str) -> None:
    with pytest.raises(ConfigError, match="count distances within the cache"):
        attention_sinks(made(method), TEXT, STRETCHES, window=8)


def test_unsupported_inputs_are_reported() -> None:
    model = made("alibi")
    with pytest.raises(ConfigError, match="but the text has 39 there"):
        cached_segments(model, TEXT, STRETCHES, length=10, memory=40)
    with pytest.raises(ConfigError, match="sinks from 0 to window"):
        attention_sinks(model, TEXT, STRETCHES, window=4)
    with pytest.raises(ConfigError, match="whose positions are limited"):
        cached_segments(made("learned"), TEXT, STRETCHES, length=10, memory=10)
    with pytest.raises(ConfigError, match="needs the start of a row"):
        cached_segments(made("fire"), TEXT, STRETCHES, length=10, memory=10)


@pytest.mark.parametrize("method", ["alibi", "t5"])
def test_both_ways_are_read_at_every_length_on_the_tokens_that_the_others_score(method: str) -> None:
    config = EvalConfig(lengths=(8, 32), tokens=64, memory=(31,), sinks=(4,))
    curve = streams(made(method), TEXT, config)
    assert curve["way"] == ["cached segments", "attention sinks"] * 2
    assert (curve["length"], curve["kept"]) == ([8, 8, 32, 32], [31, 4] * 2)
    assert curve["tokens"] == [64] * 4
    assert all(nats > 0 for nats in curve["nats"])
    assert all_curves(made(method), Corpus(TEXT[:0], TEXT, {}), config)["streams"] == curve
    assert "streams" not in all_curves(made(method), Corpus(TEXT[:0], TEXT, {}), EvalConfig(lengths=(8,), tokens=16))


def test_dropout_is_off_and_the_model_stays_in_training_mode() -> None:
    config = EvalConfig(lengths=(8,), tokens=16, memory=(4,), sinks=(2,))
    model = made("alibi", dropout=0.5).train()
    found = streams(model, TEXT, config)
    assert model.training
    assert found == streams(model.eval(), TEXT, config)


def test_a_way_that_a_method_cannot_be_read_in_is_empty() -> None:
    config = EvalConfig(lengths=(8,), tokens=16, memory=(7,), sinks=(0, 4))
    curve = streams(made("rotary"), TEXT, config)
    assert curve["way"] == ["cached segments", "attention sinks", "attention sinks"]
    assert [nats is None for nats in curve["nats"]] == [False, True, True]
    assert [nats is None for nats in streams(made("fire"), TEXT, config)["nats"]] == [True] * 3
    assert [nats is None for nats in streams(made("learned"), TEXT, config)["nats"]] == [True] * 3
