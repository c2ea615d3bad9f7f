"""The optimizers compared with their formulas, and the paper's schedule."""

import itertools
import math

import pytest
import torch

from alibi_lab.lab.config import TrainConfig
from alibi_lab.lab.training.optimizer import learning_rate, make_optimizer

PAPER = TrainConfig(  # the command of the paper's repository
    optimizer="nag", learning_rate=1.0, warmup_steps=16_000, steps=286_000, final_share=1e-4, weight_decay=0.0
)


def test_nag_is_that_of_fairseq_also_where_the_rate_changes():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    optimizer = make_optimizer(layer, "nag", 1.0, 0.0)
    buffer, old, momentum = torch.zeros_like(weight), None, 0.99
    for rate in (0.1, 0.3, 0.3, 0.05, 0.2):
        gradient = torch.randn(2, 3, dtype=torch.float64)
        layer.weight.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        correct = rate / (old or rate)  # fairseq/optim/nag.py, NAG.step, line by line
        weight += momentum * momentum * correct * buffer
        weight += -(1 + momentum) * rate * gradient
        buffer = momentum * correct * buffer - rate * gradient
        old = rate
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "nag"])
def test_matrices_inside_the_blocks_are_decayed_and_nothing_else(tiny_model, optimizer):
    model = tiny_model("alibi-learned", architecture="baevski-auli", cutoffs=(8, 24))
    decayed, others = make_optimizer(model, optimizer, 1.0, 0.1).param_groups
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {named[id(parameter)] for parameter in decayed["params"]}
    parts = ("q", "k", "v", "attention_out", "ffn_in", "ffn_out")
    assert names == {f"blocks.{n}.{part}.weight" for n in range(2) for part in parts}
    assert len(decayed["params"]) + len(others["params"]) == len(named)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_the_paper_s_schedule():
    assert learning_rate(0, PAPER) == 1e-7
    assert learning_rate(8000, PAPER) == pytest.approx(0.5, rel=1e-6)
    assert learning_rate(16_000, PAPER) == 1.0
    assert learning_rate(16_000 + 135_000, PAPER) == pytest.approx((1 + 1e-4) / 2)
    late = 270_000 - 1  # 270,000 updates of one cosine, from 1 to --min-lr 0.0001
    assert learning_rate(286_000 - 1, PAPER) == pytest.approx(
        1e-4 + 0.5 * (1 - 1e-4) * (1 + math.cos(math.pi * late / 270_000))
    )


def test_adamw_rises_from_the_first_step_and_then_falls_to_a_tenth():
    config = TrainConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[110] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(0, TrainConfig(warmup_steps=0, learning_rate=1.0)) == 1.0
