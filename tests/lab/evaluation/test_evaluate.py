"""The reductions against their definitions: one forward pass per scored token."""

import itertools

import pytest
import torch

from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import CorpusError
from alibi_lab.lab.evaluation.evaluate import (
    evaluate,
    loss_by_part,
    loss_by_position,
    mean_nats,
    nonoverlapping,
    scored_stretches,
    sliding,
    validation_nats,
)
from alibi_lab.lab.evaluation.losses import TokenLosses
from alibi_lab.lab.model.positions import METHODS

TEXT = torch.randint(64, (150,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
STRETCHES = [range(20, 40), range(120, 140)]


def assert_losses_are(losses, model, expected_inputs):
    """`expected_inputs(target)` = the first input token; each loss is recomputed alone, in text order."""
    assert losses.target.tolist() == [target for stretch in STRETCHES for target in stretch]
    for target, position, loss in zip(losses.target.tolist(), losses.position.tolist(), losses.loss_nats, strict=True):
        begin = expected_inputs(target)
        assert position == target - begin
        with torch.no_grad():
            logits = model(TEXT[begin:target].long()[None])[0, -1]
        torch.testing.assert_close(loss, -logits.log_softmax(-1)[int(TEXT[target])], rtol=1e-4, atol=1e-5)


def first_input_nonoverlapping(length):
    def first(target):
        stretch = next(stretch for stretch in STRETCHES if target in stretch)
        return stretch.start + (target - stretch.start) // length * length - 1

    return first


@pytest.mark.parametrize("method", ["sinusoidal", "t5", "alibi"])
@pytest.mark.parametrize("length", [1, 7, 10, 20])
def test_nonoverlapping_predicts_each_token_within_its_own_piece(tiny_model, method, length):
    model = tiny_model(method)
    losses = nonoverlapping(model, TEXT, STRETCHES, length=length, batch_tokens=30)
    assert_losses_are(losses, model, first_input_nonoverlapping(length))


@pytest.mark.parametrize("method", ["rotary", "alibi"])
@pytest.mark.parametrize("length", [1, 7, 20])
def test_sliding_by_one_gives_every_token_a_full_window(tiny_model, method, length):
    model = tiny_model(method)
    losses = sliding(model, TEXT, STRETCHES, length=length, stride=1, batch_tokens=30)
    assert_losses_are(losses, model, lambda target: target - length)


@pytest.mark.parametrize(("length", "stride"), [(8, 3), (8, 8), (20, 6)])
def test_sliding_by_a_stride_counts_the_last_predictions_of_each_window(tiny_model, length, stride):
    model = tiny_model("sinusoidal")
    losses = sliding(model, TEXT, STRETCHES, length=length, stride=stride, batch_tokens=64)

    def first_input(target):
        stretch = next(stretch for stretch in STRETCHES if target in stretch)
        first_scored = stretch.start + (target - stretch.start) // stride * stride
        return first_scored - (length - stride + 1)

    assert_losses_are(losses, model, first_input)
    assert {int(position) for position in losses.position} <= set(range(length - stride + 1, length + 1))


def test_the_checker_fails_when_a_window_is_off_by_one(tiny_model):
    model = tiny_model("sinusoidal")
    losses = sliding(model, TEXT, STRETCHES, length=7, stride=1, batch_tokens=30)
    with pytest.raises(AssertionError):
        assert_losses_are(losses, model, lambda target: target - 8)
    shifted = TokenLosses(target=losses.target, position=losses.position, loss_nats=losses.loss_nats.roll(1))
    with pytest.raises(AssertionError):
        assert_losses_are(shifted, model, lambda target: target - 7)


@pytest.mark.parametrize("method", METHODS)
def test_every_length_and_way_scores_the_same_tokens(tiny_model, method):
    config = EvalConfig(lengths=(4, 6, 16, 32), tokens=64, batch_tokens=64)
    curves = evaluate(tiny_model(method), TEXT, config)["by_length"]
    assert curves["length"] == [4, 6, 16, 32]
    for name in ("nonoverlapping_tokens", "sliding_tokens"):
        assert curves[name] == [64, 64, 64, None if method == "learned" else 64]
    stretches = scored_stretches(len(TEXT), config.lengths[-1], config.tokens)
    scored = [
        evaluated.target.tolist()
        for length in (4, 6, 16)
        for evaluated in (
            nonoverlapping(tiny_model(method), TEXT, stretches, length=length, batch_tokens=64),
            sliding(tiny_model(method), TEXT, stretches, length=length, stride=3, batch_tokens=64),
        )
    ]
    assert all(targets == scored[0] for targets in scored)


def test_learned_positions_have_no_result_beyond_the_trained_length(tiny_model):
    curves = evaluate(tiny_model("learned"), TEXT, EvalConfig(lengths=(8, 16, 32), tokens=32, batch_tokens=64))
    for name, column in curves["by_length"].items():
        assert (column[-1] is None) == (name != "length")
    assert curves["by_position"]["position"][-1] == 16
    lost = evaluate(tiny_model("learned"), TEXT, EvalConfig(lengths=(32,), tokens=32, batch_tokens=64))
    assert lost["by_position"] == {"position": [], "loss_nats": [], "tokens": []}
    assert curves["by_part"]["length"] == [8, 16]
    assert all(column == [] for column in lost["by_part"].values())


def test_curves_are_the_means_of_the_token_losses(tiny_model):
    model, config = tiny_model("alibi"), EvalConfig(lengths=(8, 32), tokens=64, batch_tokens=64)
    curves = evaluate(model, TEXT, config)
    stretches = scored_stretches(len(TEXT), config.lengths[-1], config.tokens)
    straight = nonoverlapping(model, TEXT, stretches, length=32, batch_tokens=64)
    slid = sliding(model, TEXT, stretches, length=8, stride=8 // 4, batch_tokens=64)
    assert curves["by_length"]["nonoverlapping_nats"][1] == pytest.approx(float(straight.loss_nats.mean()), rel=1e-6)
    assert curves["by_length"]["sliding_nats"][0] == pytest.approx(float(slid.loss_nats.mean()), rel=1e-6)
    assert curves["by_position"] == loss_by_position(straight)
    assert all(speed > 0 for speed in curves["by_length"]["tokens_per_second"])
    assert all(peak is None or peak > 10**7 for peak in curves["by_length"]["peak_memory_bytes"])


def test_position_buckets_grow_by_the_root_of_two_and_lose_no_token():
    losses = TokenLosses(target=torch.arange(12), position=torch.arange(1, 13), loss_nats=torch.arange(1.0, 13.0))
    buckets = loss_by_position(losses)
    assert buckets == {
        "position": [1, 2, 3, 4, 6, 8, 11, 12],
        "loss_nats": [1, 2, 3, 4, 5.5, 7.5, 10, 12],
        "tokens": [1, 1, 1, 1, 2, 2, 3, 1],
    }
    weighted = sum(nats * tokens for nats, tokens in zip(buckets["loss_nats"], buckets["tokens"], strict=True))
    assert weighted / 12 == pytest.approx(mean_nats(losses))


def _losses(count, add=0.0):
    return TokenLosses(target=torch.arange(count), position=torch.ones(count), loss_nats=torch.arange(count) + add)


def test_parts_hold_every_scored_token_once_in_order_of_the_text():
    parts = loss_by_part(_losses(1000), _losses(1000, add=0.5))
    assert parts["tokens"] == [143] * 6 + [142]  # seven parts of at least 128
    assert parts["nonoverlapping_nats"][:2] == [71, 143 + 71]
    assert [
        slid - straight for slid, straight in zip(parts["sliding_nats"], parts["nonoverlapping_nats"], strict=True)
    ] == [0.5] * 7
    weighted = sum(nats * tokens for nats, tokens in zip(parts["nonoverlapping_nats"], parts["tokens"], strict=True))
    assert weighted / 1000 == pytest.approx(999 / 2)
    assert loss_by_part(_losses(127), _losses(127))["tokens"] == [127]
    assert loss_by_part(_losses(10_000), _losses(10_000))["tokens"] == [313] * 16 + [312] * 16


def test_parts_are_the_same_tokens_at_every_length(tiny_model):
    text = TEXT.repeat(8)
    curve = evaluate(tiny_model("alibi"), text, EvalConfig(lengths=(8, 32), tokens=512, batch_tokens=2048))["by_part"]
    assert curve["length"] == [8] * 4 + [32] * 4
    assert curve["part"] == [0, 1, 2, 3] * 2
    assert curve["tokens"] == [128] * 8


def test_scored_stretches_lie_evenly_and_have_a_full_window_before_them():
    stretches = scored_stretches(1000, 100, 250)
    assert stretches == [range(100, 200), range(500, 600), range(900, 1000)]
    assert scored_stretches(200, 100, 10_000) == [range(100, 200)]
    for length in range(200, 900, 37):
        found = scored_stretches(length, 100, 10_000)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(found))
        assert found[0].start == 100
        assert found[-1].stop <= length


def test_a_text_shorter_than_one_window_is_refused(tiny_model):
    with pytest.raises(CorpusError, match="has 150 tokens but one evaluation window of 100 needs 200"):
        evaluate(tiny_model("alibi"), TEXT, EvalConfig(lengths=(10, 100)))


@pytest.mark.parametrize("method", ["none", "t5", "alibi", "rotary", "kerple"])
def test_windowed_is_the_truncated_context_in_a_model_of_one_layer(tiny_model, method):
    model = tiny_model(method, num_layers=1, seed=3)
    losses = nonoverlapping(model, TEXT, STRETCHES, length=20, batch_tokens=64, attention_window=7)
    for target, loss in zip(losses.target.tolist(), losses.loss_nats, strict=True):
        stretch = next(stretch for stretch in STRETCHES if target in stretch)
        begin = max(stretch.start - 1, target - 7)
        with torch.no_grad():
            logits = model(TEXT[begin:target].long()[None])[0, -1]
        torch.testing.assert_close(loss, -logits.log_softmax(-1)[int(TEXT[target])], rtol=1e-4, atol=1e-5)


def test_windowed_is_nonoverlapping_up_to_the_trained_length_and_cut_at_it_beyond(tiny_model):
    model = tiny_model("alibi")
    config = EvalConfig(lengths=(8, 16, 32), tokens=64, batch_tokens=64, windowed=True)
    curves = evaluate(model, TEXT, config)["by_length"]
    assert curves["windowed_nats"][:2] == curves["nonoverlapping_nats"][:2]
    cut = nonoverlapping(
        model,
        TEXT,
        scored_stretches(len(TEXT), config.lengths[-1], config.tokens),
        length=32,
        batch_tokens=64,
        attention_window=16,
    )
    assert curves["windowed_nats"][2] == pytest.approx(mean_nats(cut))
    assert curves["windowed_nats"][2] != curves["nonoverlapping_nats"][2]
    assert curves["windowed_tokens"] == [64, 64, 64]
    assert "windowed_nats" not in evaluate(model, TEXT, EvalConfig(lengths=(8,), tokens=32))["by_length"]


@pytest.mark.parametrize(("method", "stretch"), [("rotary", "linear"), ("rotary", "yarn"), ("alibi", "ntk")])
def test_a_stretch_changes_what_is_beyond_the_trained_length_and_nothing_else(tiny_model, method, stretch):
    model = tiny_model(method)
    plain, stretched = (
        evaluate(
            model, TEXT, EvalConfig(lengths=(8, 16, 32), tokens=64, batch_tokens=64, windowed=True, stretch=asked)
        )["by_length"]
        for asked in ("none", stretch)
    )
    for name in ("nonoverlapping_nats", "sliding_nats"):
        assert stretched[name][:2] == plain[name][:2]
        assert stretched[name][2] != plain[name][2]
    assert stretched["windowed_nats"] == plain["windowed_nats"]
    config = EvalConfig(lengths=(32,), tokens=64, batch_tokens=64)
    losses = nonoverlapping(
        model.stretched(stretch, 32),
        TEXT,
        scored_stretches(len(TEXT), config.lengths[-1], config.tokens),
        length=32,
        batch_tokens=64,
    )
    assert stretched["nonoverlapping_nats"][2] == pytest.approx(mean_nats(losses))


def test_an_adaptive_softmax_is_scored_like_the_vocabulary_that_it_spans(tiny_model):
    model = tiny_model("sinusoidal", architecture="baevski-auli", cutoffs=(16, 32))
    losses = nonoverlapping(model, TEXT, STRETCHES, length=10, batch_tokens=30)
    assert_losses_are(losses, model, first_input_nonoverlapping(10))


def test_the_test_during_training_is_the_nonoverlapping_mean_and_draws_nothing(tiny_model):
    model = tiny_model("alibi").train()
    state = torch.get_rng_state()
    nats, tokens = validation_nats(model, TEXT, length=16, tokens_to_score=48, batch_tokens=64)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    curves = evaluate(model, TEXT, EvalConfig(lengths=(16,), tokens=48, batch_tokens=64))["by_length"]
    assert (nats, tokens) == (curves["nonoverlapping_nats"][0], 48)
    assert model.training
