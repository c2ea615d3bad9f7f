"""The adaptive softmax compared with torch's, and tied weights."""

import pytest
import torch
from torch import nn

from alibi_lab.lab.config import ConfigError
from alibi_lab.lab.model.adaptive import AdaptiveInput, AdaptiveSoftmax

WIDTH, VOCABULARY, CUTOFFS = 16, 60, [10, 30]


@pytest.fixture
def parts():
    torch.manual_seed(0)
    bands, softmax = AdaptiveInput(VOCABULARY, WIDTH, CUTOFFS), AdaptiveSoftmax(WIDTH, CUTOFFS)
    return bands, softmax, torch.randn(4, 9, WIDTH), torch.randint(VOCABULARY, (4, 9))


def torch_s_own(bands, softmax):
    """AdaptiveLogSoftmaxWithLoss, which is untied, with the same weights."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, CUTOFFS, div_value=4.0)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([bands.tables[0].weight, softmax.classes.weight]))
        for n, (narrow, out) in enumerate(theirs.tail, start=1):
            narrow.weight.copy_(bands.widen[n].weight.T)
            out.weight.copy_(bands.tables[n].weight)
    return theirs


def test_losses_and_gradients_are_torch_s(parts):
    bands, softmax, x, targets = parts
    theirs = torch_s_own(bands, softmax)
    ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    losses = softmax.loss(ours, targets, bands)
    expected, _ = theirs(x_theirs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(losses.flatten(), -expected)
    losses.mean().backward()
    (-expected.mean()).backward()
    torch.testing.assert_close(ours.grad, x_theirs.grad)
    head = torch.cat([bands.tables[0].weight.grad, softmax.classes.weight.grad])
    torch.testing.assert_close(head, theirs.head.weight.grad)
    for n, (narrow, out) in enumerate(theirs.tail, start=1):
        torch.testing.assert_close(bands.widen[n].weight.grad.T, narrow.weight.grad)
        torch.testing.assert_close(bands.tables[n].weight.grad, out.weight.grad)
    assert bands.widen[0].weight.grad is None  # the first band's matrix serves the input only


def test_log_probabilities_are_torch_s_and_sum_to_one(parts):
    bands, softmax, x, targets = parts
    found = softmax.log_prob(x, bands)
    torch.testing.assert_close(found.flatten(0, 1), torch_s_own(bands, softmax).log_prob(x.flatten(0, 1)))
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(4, 9))
    torch.testing.assert_close(softmax.loss(x, targets, bands), -found.gather(-1, targets[..., None])[..., 0])


def test_inputs_are_rows_of_the_tables_widened(parts):
    bands, _, _, _ = parts
    tokens = torch.tensor([[59, 0, 9], [10, 29, 30]])
    found = bands(tokens)
    for row, column, band, index in (
        (0, 0, 2, 29),
        (0, 1, 0, 0),
        (0, 2, 0, 9),
        (1, 0, 1, 0),
        (1, 1, 1, 19),
        (1, 2, 2, 0),
    ):
        expected = bands.widen[band].weight @ bands.tables[band].weight[index]
        torch.testing.assert_close(found[row, column], expected)
    assert [table.weight.shape for table in bands.tables] == [(10, 16), (20, 4), (30, 1)]


def test_tied_gradients_are_those_of_the_input_and_of_the_output_together(parts):
    bands, softmax, _, targets = parts
    twin = AdaptiveInput(VOCABULARY, WIDTH, CUTOFFS)
    twin.load_state_dict(bands.state_dict())
    softmax.loss(
        bands(targets), targets.roll(1), twin
    ).mean().backward()  # untied: bands at the input, twin at the output
    apart = [
        weight.grad + (0 if other.grad is None else other.grad)
        for weight, other in zip(bands.parameters(), twin.parameters(), strict=True)
    ]
    bands.zero_grad()
    softmax.loss(bands(targets), targets.roll(1), bands).mean().backward()
    for weight, expected in zip(bands.parameters(), apart, strict=True):
        torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("cutoffs", [(10, 60), (0, 10), (1, 2, 3)])
def test_bands_that_cannot_be_are_refused(cutoffs):
    with pytest.raises(ConfigError, match=r"model\.cutoffs is \(.*pass lower ones, or fewer"):
        AdaptiveInput(VOCABULARY, WIDTH, cutoffs)
