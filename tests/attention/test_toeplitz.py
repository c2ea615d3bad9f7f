"""toeplitz_attention: compared with a loop over pairs, equivalences, linear memory, and errors."""

import math

import pytest
import toeplitz_calls
import torch
import torch._dynamo.compiled_autograd
from attention_checks import WITH_KEY_BIAS
from toeplitz_calls import check, draw

from alibi_attn.attention.toeplitz import toeplitz_attention


def inputs(t: int = 300, h: int = 4, k: int = 2, *, causal: bool = True) -> list[torch.Tensor]:
    shapes = (1, h, t, 16), (1, k, t, 16), (1, k, t, 16), (h, t if causal else 2 * t - 1)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
def test_random_calls_are_the_loop_over_pairs(backend: str) -> None:
    for seed in range(30):
        check(draw(seed), backend)


def test_the_checker_finds_a_table_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*, table: torch.Tensor, **given: object) -> object:
        return toeplitz_attention(**given, table=table.roll(1, dims=1))

    monkeypatch.setattr(toeplitz_calls, "toeplitz_attention", shifted)
    with pytest.raises(AssertionError, match="is allowed"):
        check(draw(0), "dense")


def test_auto_takes_native_and_the_same_bits_come_again() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    found = []
    for backend in ("auto", "native", "native"):
        output = toeplitz_attention(*leaves, backend=backend)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_memory_of_native_is_linear() -> None:
    leaves, kept = [x.requires_grad_() for x in inputs(2048)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        toeplitz_attention(*leaves, backend="native").sum().backward()
    assert sum(kept) < 10 * sum(x.numel() for x in leaves) < 2048 * 2048


def test_the_gradient_of_a_table_keeps_its_digits_over_many_pairs() -> None:
    """Distance 0 has one pair per query; for half-precision inputs the sum itself is in fp64 and must not round."""
    query, key, value, table = (x.to(torch.bfloat16) for x in inputs(4096, 1, 1))
    found = []
    for dtype, backend in ((torch.float32, "native"), (torch.float64, "native")):
        leaf = table.to(dtype).requires_grad_()
        output = toeplitz_attention(query.to(dtype), key.to(dtype), value.to(dtype), leaf, backend=backend)
        found.append(torch.autograd.grad(output.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6 * float(found[1].abs().max()))


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
def test_hidden_keys_are_never_used(backend: str) -> None:
    query, key, value, table = inputs(100)
    mask = torch.rand(1, 100) < 0.7
    clean = toeplitz_attention(query, key, value, table, key_mask=mask, backend=backend)
    key, value = (x.masked_fill(~mask[:, None, :, None], math.nan) for x in (key, value))
    spoiled = toeplitz_attention(query, key, value, table, key_mask=mask, backend=backend)
    torch.testing.assert_close(spoiled, clean)


def test_dropout_is_the_same_mask_in_native_and_in_the_specification() -> None:
    leaves, found = [x.requires_grad_() for x in inputs(200)], []
    for backend in WITH_KEY_BIAS:
        torch.manual_seed(7)
        output = toeplitz_attention(*leaves, dropout_p=0.3, backend=backend)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert not torch.allclose(found[0][0], toeplitz_attention(*leaves))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_autograd_of_an_eager_native_forward_gives_the_table_its_gradient() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    expected = torch.autograd.grad(toeplitz_attention(*leaves, backend="native").square().sum(), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        toeplitz_attention(*leaves, backend="native").square().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))


def test_a_named_kernel_refuses_a_table_in_torch_func() -> None:
    query, key, value, table = inputs()
    with pytest.raises(ValueError, match=r"does not differentiate or map a table of distances in torch\.func"):
        torch.func.grad(lambda x: toeplitz_attention(query, key, value, x, backend="native").sum())(table)


@pytest.mark.parametrize(("query_len", "key_len"), [(0, 5), (5, 0)])
def test_nothing_gives_nothing(query_len: int, key_len: int) -> None:
    query, key, table = torch.randn(1, 2, query_len, 8), torch.randn(1, 2, key_len, 8), torch.randn(2, 5)
    output, lse = toeplitz_attention(query, key, key, table.requires_grad_(), query_offset=0, return_lse=True)
    assert bool((output == 0).all())
    assert bool((lse == -math.inf).all())
    (grad,) = torch.autograd.grad(output.sum(), table)
    assert bool((grad == 0).all())
