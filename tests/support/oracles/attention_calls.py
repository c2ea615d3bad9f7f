"""Calls of `alibi_attention` for the tests of transforms, graphs and threads, and comparisons of their results."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alibi_attn.attention.api import alibi_attention


class Watched(TorchDispatchMode):
    """Lets every operator through; records all names, those of our operators, and the numbers in the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.seen: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if func.namespace == "alibi_attn":
            self.seen.add(func.name())
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def draw(*lead: int, b=2, h=4, k=2, t=70, s=None, d=8, dtype=torch.float32, requires_grad=True) -> list[Tensor]:
    """query, key, value, slopes [H]; `lead` are leading axes of all of them."""
    s = s or t
    shapes = (b, h, t, d), (b, k, s, d), (b, k, s, d), (h,)
    found = [torch.randn(*lead, *shape, dtype=dtype) for shape in shapes]
    found[3] = found[3].abs() + 0.05
    return [x.requires_grad_(requires_grad) for x in found]


def total(output: Tensor, lse: Tensor) -> Tensor:
    return output.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sin().sum()


def loss(*arguments, **options) -> Tensor:
    """A number that depends on every output and every lse."""
    return total(*alibi_attention(*arguments, return_lse=True, **options))


def gradients(function, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(function(*leaves), leaves))


def assert_equal(ours, truth) -> None:
    for x, y in zip(ours, truth, strict=True):
        assert torch.equal(x, y), f"off by {float((x - y).abs().max()):.1e}"


def assert_close(ours, truth) -> None:
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
