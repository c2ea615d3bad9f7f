"""The reductions against their definitions: one forward pass per scored token."""

import itertools

import pytest
import torch

from alibi_attn.lab.config import EvalConfig
from alibi_attn.lab.data import CorpusError
from alibi_attn.lab.evaluate import (
    evaluate,
    loss_by_position,
    mean_nats,
    nonoverlapping,
    scored_stretches,
    sliding,
    stride_at,
)
from alibi_attn.lab.losses import TokenLosses
from alibi_attn.lab.positions import METHODS

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


def test_sliding_by_the_whole_window_is_nonoverlapping(tiny_model):
    model = tiny_model("alibi")
    slid = sliding(model, TEXT, STRETCHES, length=10, stride=10, batch_tokens=64)
    straight = nonoverlapping(model, TEXT, STRETCHES, length=10, batch_tokens=64)
    torch.testing.assert_close(slid.loss_nats, straight.loss_nats)
    assert torch.equal(slid.position, straight.position)


def test_how_windows_are_batched_changes_nothing(tiny_model):
    model = tiny_model("t5")
    one, many = (nonoverlapping(model, TEXT, STRETCHES, length=6, batch_tokens=size) for size in (1, 10_000))
    torch.testing.assert_close(one.loss_nats, many.loss_nats)


@pytest.mark.parametrize("method", METHODS)
def test_every_length_and_way_scores_the_same_tokens(tiny_model, method):
    config = EvalConfig(lengths=(4, 6, 16, 32), tokens=64, batch_tokens=64)
    curves = evaluate(tiny_model(method), TEXT, config)["by_length"]
    assert curves["length"] == [4, 6, 16, 32]
    for name in ("nonoverlapping_tokens", "sliding_tokens"):
        assert curves[name] == [64, 64, 64, None if method == "learned" else 64]
    stretches = scored_stretches(len(TEXT), config)
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


def test_curves_are_the_means_of_the_token_losses(tiny_model):
    model, config = tiny_model("alibi"), EvalConfig(lengths=(8, 32), tokens=64, stride=2, batch_tokens=64)
    curves = evaluate(model, TEXT, config)
    stretches = scored_stretches(len(TEXT), config)
    straight = nonoverlapping(model, TEXT, stretches, length=32, batch_tokens=64)
    slid = sliding(model, TEXT, stretches, length=8, stride=2, batch_tokens=64)
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


def test_scored_stretches_lie_evenly_and_have_a_full_window_before_them():
    stretches = scored_stretches(1000, EvalConfig(lengths=(10, 100), tokens=250))
    assert stretches == [range(100, 200), range(500, 600), range(900, 1000)]
    assert scored_stretches(200, EvalConfig(lengths=(100,), tokens=10_000)) == [range(100, 200)]
    for length in range(200, 900, 37):
        found = scored_stretches(length, EvalConfig(lengths=(100,), tokens=10_000))
        assert all(a.stop <= b.start for a, b in itertools.pairwise(found))
        assert found[0].start == 100
        assert found[-1].stop <= length


def test_a_text_shorter_than_one_window_is_refused(tiny_model):
    with pytest.raises(CorpusError, match="has 150 tokens but one evaluation window of 100 needs 200"):
        evaluate(tiny_model("alibi"), TEXT, EvalConfig(lengths=(10, 100)))


def test_the_stride_is_a_quarter_unless_one_is_asked_for():
    assert [stride_at(length, None) for length in (1, 4, 128, 2048)] == [1, 1, 32, 512]
    assert [stride_at(length, 64) for length in (16, 128)] == [16, 64]


def test_evaluation_leaves_the_model_as_it_was(tiny_model):
    model = tiny_model("alibi").train()
    evaluate(model, TEXT, EvalConfig(lengths=(8,), tokens=8, batch_tokens=64))
    assert model.training
