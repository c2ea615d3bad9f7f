"""One comparison of tensors whose entries differ in size; `tests/hf/test_patch.py` shows that it notices a wrong one."""

from torch import Tensor


def assert_within(found: Tensor, truth: Tensor, share: float) -> None:
    """The largest difference is at most a share of the largest entry."""
    assert found.shape == truth.shape
    error = float((found.detach().double() - truth.detach().double()).abs().max() / truth.detach().abs().max())
    assert error <= share, f"off by {error:.2g} of the largest entry, and {share:.2g} is allowed"
