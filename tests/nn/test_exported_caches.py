"""Caches in programs of torch.export: made or copied by the exported function; one that holds tokens is refused."""

import copy

import pytest
import torch
from torch import Tensor

from alibi_attn import ALiBiAttention, KVCache

pytestmark = pytest.mark.usefixtures("no_gradients")
MAKES = {"grows": lambda layer: KVCache(), "capacity": lambda layer: KVCache(capacity=50)}
each_cache = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


class Exported(torch.nn.Module):
    """Two calls with one cache, made by the exported function or copied from an empty one, or with a cache that holds tokens."""

    def __init__(self, make, held: Tensor | None = None, **options: object) -> None:
        super().__init__()
        self.layer, self.make, self.held = ALiBiAttention(24, 6, **options).eval(), make, None
        if held is not None:
            self.held = KVCache() if make is None else make(self.layer)
            self.layer(held, cache=self.held)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cache = self.make(self.layer) if self.held is None else self.held
        return torch.cat([self.layer(x, cache=cache), self.layer(y, cache=cache)], 1)


@each_cache
def test_an_exported_program_makes_its_cache_for_any_length(make) -> None:
    model, y = Exported(make), torch.randn(2, 1, 24)
    lengths = {1: torch.export.Dim("length", min=2, max=40)}
    program = torch.export.export(model, (torch.randn(2, 9, 24), y), dynamic_shapes=(lengths, None), strict=False)
    for count in (2, 9, 33):
        x = torch.randn(2, count, 24)
        torch.testing.assert_close(program.module()(x, y), model.layer(torch.cat([x, y], 1)), rtol=0, atol=1e-5)


def test_an_exported_program_copies_a_cache_of_a_reach() -> None:
    model, x, y = Exported(None, qk_norm=True), torch.randn(2, 9, 24), torch.randn(2, 1, 24)
    empty = model.layer.reach_cache()
    model.make = lambda layer: copy.deepcopy(empty)
    program = torch.export.export(model, (x, y), strict=False)
    torch.testing.assert_close(program.module()(x, y), model.layer(torch.cat([x, y], 1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
@each_cache
def test_export_refuses_a_cache_that_holds_tokens(make, strict: bool) -> None:
    """The program would read the tokens of the day it was made, and write nothing."""
    x, y = torch.randn(2, 9, 24), torch.randn(2, 1, 24)
    model = Exported(make, held=x)
    with pytest.raises(Exception, match=r"torch\.export does not record writes to a cache that held tokens"):
        torch.export.export(model, (x, y), strict=strict)
    assert len(model.held) == 9
