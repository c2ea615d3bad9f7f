"""torch's modes, compiler, checks and transforms around the Triton kernels; runs in the process with the interpreter."""

import contextlib
import functools

import pytest
import torch
from attention_calls import Watched, assert_close, assert_equal, draw, loss
from torch import Tensor

from alibi_attn import alibi_attention, forgetting_attention, head_reach
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.operators.schema import Arguments

pytestmark = pytest.mark.usefixtures("interpreter")


def test_eager_calls_skip_the_operator_and_a_dispatch_mode_changes_no_bit() -> None:
    """The node that autograd records in eager code is no operator's; under a mode our operators run."""
    q, k, v = (torch.randn(1, 4, 70, 16, requires_grad=True) for _ in range(3))
    gates = torch.nn.functional.logsigmoid(torch.randn(1, 4, 70) + 2).requires_grad_()
    masked = {"causal": False, "key_mask": torch.rand(1, 70) < 0.8, "query_offset": torch.tensor([0])}
    for attend, leaves, options in (
        (alibi_attention, (q, k, v), {}),
        (alibi_attention, (q, k, v), masked),
        (forgetting_attention, (q, k, v, gates), {}),
    ):
        results = []
        for mode in (contextlib.nullcontext(), watched := Watched()):
            with mode:
                output, lse = attend(*leaves, **options, return_lse=True, backend="fused")
                results.append((output, lse, *torch.autograd.grad(output.square().sum() + lse.sum(), leaves)))
        assert_equal(*results)
        assert "fused" not in results[0][0].grad_fn.name()
        assert watched.seen == {"alibi_attn::fused_forward", "alibi_attn::fused_backward"}


@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_passes_torchs_checks(biased: bool) -> None:
    q, k, v, m = draw(t=12)
    spec = make_spec(q, k, v, m, key_bias=torch.randn(2, 4, 12).requires_grad_() if biased else None, tolerance=1e-7)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = torch.ops.alibi_attn.fused_forward.default
    torch.library.opcheck(forward, tuple(Arguments.of(spec, q, k, v)), test_utils=tests)


def test_compile_autocast_and_checkpointing() -> None:
    *rows, m = leaves = draw(b=1, k=4, t=12)
    of_fused = functools.partial(loss, backend="fused")
    compiled = torch.compile(of_fused, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (12, 10):
        cut = [x[:, :, :length] for x in rows]
        assert_equal(*(torch.autograd.grad(f(*cut, m), leaves) for f in (of_fused, compiled)))
    again = torch.utils.checkpoint.checkpoint(of_fused, *leaves, use_reentrant=False)
    assert_equal(*(torch.autograd.grad(x, leaves) for x in (of_fused(*leaves), again)))
    with torch.autocast("cpu", torch.float16):
        assert alibi_attention(*rows, backend="fused").dtype == torch.float16
    assert int(head_reach(*rows[:2], backend="fused").max()) <= 12


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_transforms_of_torch_func_are_right_or_refused() -> None:
    """Gradients per batch entry equal those of each entry alone; unsupported transforms raise."""
    inputs = draw(3, b=1, h=2, k=1, t=40, d=16, requires_grad=False)
    of_entry = functools.partial(loss, backend="fused")
    each = torch.vmap(torch.func.grad(of_entry, argnums=(0, 1, 2, 3)))(*inputs)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in inputs]
        assert_close([x[i] for x in each], torch.autograd.grad(of_entry(*leaves), leaves))
    one = tuple(x[0] for x in inputs)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.jacrev(torch.func.grad(of_entry))(*one)
    with pytest.raises(RuntimeError, match="forward mode was requested"):
        torch.func.jvp(of_entry, one, one)
    dropped = functools.partial(of_entry, dropout_p=0.5)
    torch.manual_seed(3)
    assert len(torch.vmap(dropped, randomness="different")(*inputs).unique()) == 3
    same = torch.vmap(dropped, randomness="same")(*(x[:1].expand_as(x) for x in inputs))
    assert len(same.unique()) == 1, "with the same seed entries drop alike"


def test_transforms_and_graphs_carry_key_biases() -> None:
    """vmap, torch.compile, and a bias that broadcasts."""
    query, key, value = (torch.randn(2, heads, 20, 16) for heads in (2, 1, 1))
    bias = torch.randn(2, 2, 20).requires_grad_()

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
