"""Positions in the plane and in space, and registers, against the definition in fp64 written with `torch.cdist`."""

import pytest
import space_draws
import torch
from space_oracle import definition, points
from torch import Tensor

from alibi_attn import alibi_attention, alibi_slopes
from alibi_attn.attention.run import space

DRAWS = 60


@pytest.mark.parametrize("seed", range(DRAWS))
def test_outputs_and_gradients_agree_with_the_definition(seed, monkeypatch):
    drawn = space_draws.draw(seed)
    if drawn.backend == "by rows":
        monkeypatch.setattr(space, "MOST_SCORES", 3000)
    space_draws.assert_near(drawn)


def test_wrong_results_are_detected():
    drawn = space_draws.draw(21)
    shifted = drawn._replace(places=tuple(x + 0.01 * torch.arange(x.shape[1])[:, None] for x in drawn.places))
    with pytest.raises(AssertionError, match="is off by"):
        space_draws.assert_near(shifted)


def test_dropout_of_rows_in_chunks_is_that_of_one_call(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 70, 8)
    given = {"causal": False, "positions": points("grid", 1, 70, 3), "dropout_p": 0.5, "key_bias": torch.randn(70)}
    torch.manual_seed(1)
    whole = alibi_attention(q, k, v, [0.5, 0.1], backend="reference", **given)
    monkeypatch.setattr(space, "MOST_SCORES", 2 * 70 * 9)
    torch.manual_seed(1)
    torch.testing.assert_close(alibi_attention(q, k, v, [0.5, 0.1], **given), whole, rtol=1e-4, atol=1e-5)


def test_places_far_apart_in_one_block_keep_their_digits():
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    places = points("random", 1, 40, 2) + 1e5 * (torch.arange(40) % 2)[:, None]
    slopes = torch.tensor([0.5, 0.1])
    expected, _ = definition(*(x.double() for x in (q, k, v)), slopes, places, places)
    found = alibi_attention(q, k, v, slopes, causal=False, positions=places, backend="native")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("registers", [0, 5])
@pytest.mark.parametrize("is_self", [True, False])
def test_tokens_keep_their_dropout_when_they_are_sorted(registers, is_self):
    q, k, v = torch.randn(2, 3, 150 if is_self else 90, 8), *torch.randn(2, 2, 3, 150, 8)
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    places = points("random", 2, 150, 2)
    given = {"causal": False, "positions": places, "registers": registers, "dropout_p": 0.3}
    given |= {} if is_self else {"query_positions": places[:, -90:] + 0.5}

    def results(backend: str) -> list[Tensor]:
        torch.manual_seed(1)
        output = alibi_attention(q, k, v, [2.0, 0.5, 0.1], backend=backend, **given)
        return [output, *torch.autograd.grad((output * output).sum(), (q, k, v))]

    for found, expected in zip(results("native"), results("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_registers_on_a_line_have_distance_zero_both_ways():
    q, k, v = torch.randn(3, 1, 4, 300, 16, dtype=torch.float64)
    slopes = torch.tensor(alibi_slopes(4))
    index = torch.arange(300, dtype=torch.float64)[None, :, None]
    expected, _ = definition(q, k, v, slopes, index, index, registers=10)
    for backend in ("native", "dense", "reference"):
        found = alibi_attention(q, k, v, slopes, causal=False, registers=10, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    times = index[..., 0] * 2
    expected, _ = definition(q, k, v, slopes, 2 * index, 2 * index, registers=10)
    found = alibi_attention(q, k, v, slopes, causal=False, registers=10, positions=times)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
