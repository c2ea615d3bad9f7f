"""`key_bias` in our Triton kernels; runs in the child process with Triton's interpreter; see `fused_in_interpreter`."""

import torch
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.operators.schema import Arguments


def transformed_and_checked() -> None:
    """Checks opcheck, vmap, torch.compile and a bias that broadcasts."""
    query, key, value = (torch.randn(2, heads, 20, 16) for heads in (2, 1, 1))
    bias = torch.randn(2, 2, 20).requires_grad_()
    spec = make_spec(query, key, value, torch.rand(2), key_bias=bias, tolerance=1e-7)
    arguments = tuple(Arguments.of(spec, query, key, value))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.alibi_attn.fused_forward.default, arguments, test_utils=tests)

    def attended(*x: Tensor) -> Tensor:
        return alibi_attention(*x[:3], key_bias=x[3], backend="fused")

    plain = attended(query, key, value, bias)
    one = torch.func.vmap(lambda *x: attended(*(y[None] for y in x))[0])(query, key, value, bias)
    torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-5)
    (wanted,) = torch.autograd.grad(plain.square().sum(), bias)
    of_bias = torch.func.grad(lambda b: attended(query, key, value, b).square().sum())(bias.detach())
    torch.testing.assert_close(of_bias, wanted)
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    (again,) = torch.autograd.grad(compiled(query, key, value, bias).square().sum(), bias)
    torch.testing.assert_close(again, wanted)
    shared = torch.randn(20).requires_grad_()
    wide = shared.detach().expand(2, 2, 20).clone().requires_grad_()
    of_all, of_each = (torch.autograd.grad(attended(query, key, value, b).square().sum(), b)[0] for b in (shared, wide))
    torch.testing.assert_close(of_all, of_each.sum((0, 1)), rtol=1e-4, atol=1e-5)


def tiles_of_gates(length: int) -> tuple[int, int]:
    """Returns (most tiles visited by 128 queries, number of tiles), for steady gates plus 10⁶ on every bias."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, length, 16).unbind(0)
    bias = torch.full((1, 1, length), 0.5, dtype=torch.float64).cumsum(-1) + 1e6
    spec = make_spec(query, key, value, [0.0], key_bias=bias, tolerance=1e-6)
    bands = fused.plan(spec, query, key, value).bands
    return int((bands[..., 1] - bands[..., 0]).max()), -(-length // TILE)
