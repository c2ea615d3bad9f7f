"""Sets of slopes: the formulas of their docstrings, and the distribution of the random ones."""

import math

import pytest
import torch

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Pass
from alibi_lab.recipes.slope_search import COMPARED

FORMULAS = {
    "Flattest4": lambda h, heads: 2 ** (-2 * h / heads),
    "Flattest16": lambda h, heads: 2 ** (-4 * h / heads),
    "Flattest4096": lambda h, heads: 2 ** (-12 * h / heads),
    "Flattest65536": lambda h, heads: 2 ** (-16 * h / heads),
    "AboveOne": lambda h, heads: 8 * 2 ** (-8 * h / heads),
    "Uniform": lambda h, heads: h / (heads + 1),
}


def model_with(method: str, *, heads: int, seed: int = 0) -> LanguageModel:
    config = ModelConfig(method=method, num_layers=1, num_heads=heads, embed_dim=2 * heads, ffn_dim=8)
    return LanguageModel(config, trained_length=16, seed=seed)


def slopes_of(name: str, *, heads: int = 8, seed: int = 0) -> torch.Tensor:
    model = model_with(f"alibi_lab.lab.systems.slope_range:{name}", heads=heads, seed=seed)
    return model.position.bias(Pass(16, 16))


@pytest.mark.parametrize("heads", [1, 6, 8])
@pytest.mark.parametrize("name", FORMULAS)
def test_slopes_have_the_formula_of_their_set(name, heads):
    expected = [FORMULAS[name](h, heads) for h in range(1, heads + 1)]
    torch.testing.assert_close(slopes_of(name, heads=heads), torch.tensor(expected), rtol=1e-6, atol=0)


def test_random_slopes_are_exponentially_distributed_and_depend_on_the_seed():
    many = slopes_of("Exponential", heads=4096).double().sort().values
    steps = (torch.arange(4096) + 0.5) / 4096
    assert float((1 - torch.exp(-many) - steps).abs().max()) < 1.63 / math.sqrt(4096)  # Kolmogorov-Smirnov, 1 %
    assert not torch.equal(slopes_of("Exponential"), slopes_of("Exponential", seed=1))
    assert torch.equal(slopes_of("Exponential"), slopes_of("Exponential"))


def test_a_training_changes_no_slopes_except_the_trained_ones():
    for method in COMPARED:
        model = model_with(method, heads=2)
        tokens = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(0))
        model(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
        trained = [p for name, p in model.named_parameters() if name.startswith("position.") and p.grad is not None]
        assert len(trained) == (method == "alibi-learned")
