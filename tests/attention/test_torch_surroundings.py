"""torch's checkpoints, torch.func, hooks, modes, copies and threads around a call change no result."""

import copy
import io
import threading

import pytest
import torch
from attention_calls import Watched, assert_close, assert_equal, draw, gradients, loss, total
from attention_checks import ON_CPU
from differential_arrays import arrays
from differential_calls import draw as draw_call
from differential_checks import answer, answerable
from programs import printed
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from alibi_attn import alibi_attention
from alibi_attn.attention.call.transforms import constant_when_compiled
from alibi_attn.nn import ALiBiAttention, ALiBiTransformerBlock

every_backend = pytest.mark.parametrize("backend", ON_CPU)
quiet = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.mark.parametrize("backend", ["banded", "native"])
def test_dispatch_modes_see_our_operators_and_change_no_bit(backend: str) -> None:
    """Eager calls bypass our operators; random calls of the whole contract are bit-identical under a mode."""
    for seed in range(400, 412):
        call = answerable(draw_call(seed), backend)
        numbers = arrays(call)
        without = answer(call, numbers, backend=backend).results
        with Watched() as watched:
            through = answer(call, numbers, backend=backend).results
        assert_equal((x.nan_to_num() for x in through.values()), (without[name].nan_to_num() for name in through))
        if call.batch and call.query_len and call.key_len:
            assert f"alibi_attn::{backend}_forward" in watched.seen


@every_backend
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("return_lse", [True, False])
def test_checkpointing_changes_no_bit(backend: str, reentrant: bool, return_lse: bool) -> None:
    leaves = draw()

    def attention(q, k, v, m):
        found = alibi_attention(q, k, v, m, window=50, return_lse=return_lse, backend=backend)
        output, lse = found if return_lse else (found, torch.zeros(()))
        return output.square().sum() + lse.sum()

    exact = gradients(attention, leaves)
    for early in (True, False):
        with set_checkpoint_early_stop(early):
            ours = checkpoint(attention, *leaves, use_reentrant=reentrant)
            ours.backward(retain_graph=False)
        assert_equal([x.grad for x in leaves], exact)
        for x in leaves:
            x.grad = None


@every_backend
def test_tensors_kept_elsewhere_come_back_and_none_is_kept_twice(backend: str) -> None:
    leaves = draw()
    exact = gradients(lambda *x: loss(*x, backend=backend), leaves)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().data_ptr() if x.numel() else 0)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = loss(*leaves, backend=backend)
    assert_equal(torch.autograd.grad(value, leaves), exact)
    if backend in ("banded", "native"):
        assert [kept.count(x.untyped_storage().data_ptr()) for x in leaves] == [1, 1, 1, 1]
    with torch.autograd.graph.save_on_cpu():
        value = loss(*leaves, backend=backend)
    assert_equal(torch.autograd.grad(value, leaves), exact)


@every_backend
def test_grad_and_vjp_are_those_of_autograd(backend: str) -> None:
    leaves = draw()
    exact = gradients(lambda *x: loss(*x, backend=backend), leaves)
    plain = [x.detach() for x in leaves]
    assert_equal(grad(lambda *x: loss(*x, backend=backend), argnums=(0, 1, 2, 3))(*plain), exact)
    (value_only,) = (grad(lambda v: loss(plain[0], plain[1], v, plain[3], backend=backend))(plain[2]),)
    assert torch.equal(value_only, exact[2])
    output, back = vjp(lambda *x: alibi_attention(*x, backend=backend), *plain)
    (other,) = (torch.autograd.grad(alibi_attention(*leaves, backend=backend), leaves, output.detach()),)
    assert_equal(back(output), other)


@every_backend
def test_any_axis_may_be_mapped_and_any_input_shared(backend: str) -> None:
    """Axes at other positions, two axes, shared keys or queries, and shared slopes, whose gradients are sums."""
    q, k, v, m = draw(2, 3, requires_grad=False, t=20)

    def one(q, k, v, m):
        return alibi_attention(q, k, v, m, backend=backend)

    truth = torch.stack([torch.stack([one(q[i, j], k[i, j], v[i, j], m[i, j]) for j in range(3)]) for i in range(2)])
    torch.testing.assert_close(vmap(vmap(one))(q, k, v, m), truth)
    moved = vmap(one, in_dims=(4, 2, 1, 1), out_dims=3)(
        q[1].movedim(0, 4), k[1].movedim(0, 2), v[1].movedim(0, 1), m[1].T
    )
    torch.testing.assert_close(moved, truth[1].movedim(0, 3))
    for shared in ((None, 0, 0, 0), (0, None, 0, None), (0, 0, None, None), (None, None, None, 0)):
        inputs = [x[0] if axis == 0 else x[0, 0] for x, axis in zip((q, k, v, m), shared, strict=True)]

        def total(*x, axes=shared):
            return vmap(one, in_dims=axes)(*x).square().sum()

        def looped(*x, axes=shared):
            entries = [[y if axis is None else y[i] for y, axis in zip(x, axes, strict=True)] for i in range(3)]
            return sum(one(*entry).square().sum() for entry in entries)

        assert_close(grad(total, argnums=(0, 1, 2, 3))(*inputs), grad(looped, argnums=(0, 1, 2, 3))(*inputs))


def test_a_module_has_gradients_by_sample_and_an_ensemble_runs_as_one() -> None:
    block = ALiBiTransformerBlock(16, 4, num_kv_heads=2, learn_slopes=True)
    x = torch.randn(3, 30, 16)

    def of_sample(parameters, sample):
        return functional_call(block, parameters, (sample[None],)).square().sum()

    parameters = dict(block.named_parameters())
    by_sample = vmap(grad(of_sample), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        exact = torch.autograd.grad(block(x[i : i + 1]).square().sum(), list(parameters.values()))
        assert_close([by_sample[name][i] for name in parameters], exact)
    blocks = [ALiBiAttention(16, 4, slopes=torch.rand(4)) for _ in range(3)]
    outputs = vmap(lambda *state: functional_call(blocks[0], state, (x,)))(*stack_module_state(blocks))
    assert_close(outputs, [module(x) for module in blocks])


@every_backend
@quiet
def test_jacobians_are_right_and_forward_mode_and_second_derivatives_are_refused(backend: str) -> None:
    q, k, v, m = draw(b=1, h=2, k=1, t=3, d=2, dtype=torch.float64, requires_grad=False)

    def attention(q, m):
        return alibi_attention(q, k, v, m, backend=backend)

    exact = torch.autograd.functional.jacobian(lambda q: attention(q, m), q)
    assert_close([jacrev(attention)(q, m)], [exact])

    def number(q):
        return attention(q, m).square().sum()

    for twice in (grad(lambda q: grad(number)(q).sum()), jacrev(jacrev(number)), hessian(number), jacrev(grad(number))):
        with pytest.raises(RuntimeError, match="differentiable once"):
            twice(q)
    for forward in (
        lambda: jvp(number, (q,), (q,)),
        lambda: jacfwd(number)(q),
        lambda: vmap(lambda q: jvp(number, (q,), (q,)))(q[None]),
    ):
        with pytest.raises(RuntimeError, match="reverse mode, but forward mode was requested"):
            forward()
    for mode in (torch.no_grad, torch.enable_grad):
        with forward_ad.dual_level(), mode(), pytest.raises(RuntimeError, match="forward mode was requested"):
            attention(q, forward_ad.make_dual(m, m))


def test_numbers_made_inside_of_a_transform_stay_there() -> None:
    """Slopes are cached between calls; those of a transform or of fake tensors would be invalid outside."""
    q, k, v, _ = draw(b=1, requires_grad=False)
    for at, slopes in enumerate(([0.51, 0.2, 0.1, 0.3], [0.52, 0.2, 0.1, 0.3])):
        if at == 0:
            grad(lambda v, m=slopes: alibi_attention(q, k, v, m).sum())(v)
        else:
            with FakeTensorMode(), pytest.raises(Exception, match="FakeTensor"):
                alibi_attention(q, k, v, slopes)
        for backend in ("native", "dense"):
            output = alibi_attention(q, k, v, slopes, backend=backend)
            assert_equal([output], [alibi_attention(q, k, v, torch.tensor(slopes), backend=backend)])
            assert not torch._C._functorch.is_functorch_wrapped_tensor(output)


@every_backend
def test_each_gradient_is_the_same_alone_again_and_through_hooks(backend: str) -> None:
    leaves = draw()
    options = {"causal": False, "backend": backend}
    exact = gradients(lambda *x: loss(*x, **options), leaves)
    value = loss(*leaves, **options)
    assert_equal(torch.autograd.grad(value, leaves, retain_graph=True), exact)
    for at in range(4):
        assert_equal(torch.autograd.grad(value, leaves[at], retain_graph=True), [exact[at]])
        alone = [x.detach().requires_grad_(i == at) for i, x in enumerate(leaves)]
        assert_equal(torch.autograd.grad(loss(*alone, **options), alone[at]), [exact[at]])
    leaves[1].register_hook(lambda gradient: 2 * gradient)
    leaves[3] = torch.nn.Parameter(leaves[3].detach().expand(2, 4).clone())
    loss(*leaves, **options).backward()
    assert_equal([leaves[1].grad], [2 * exact[1]])
    assert_close([leaves[3].grad.sum(0)], [exact[3]])


@every_backend
def test_without_gradients_and_under_autocast_the_numbers_are_the_same(backend: str) -> None:
    q, k, v, m = draw()
    exact = alibi_attention(q, k, v, m.detach(), backend=backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_equal([alibi_attention(q, k, v, m, backend=backend)], [exact])

    def attention(*x):
        return alibi_attention(*x, return_lse=True, backend=backend)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, m)
        kept = checkpoint(attention, q, k, v, m, use_reentrant=False)
    cast = [*(x.detach().bfloat16().requires_grad_() for x in (q, k, v)), m]
    truth = gradients(lambda *x: total(*attention(*x)), cast)
    assert [x.dtype for x in (found[0], *truth)] == [*[torch.bfloat16] * 4, torch.float32]
    for way in (found, kept):
        assert_equal(torch.autograd.grad(total(*way), [q, k, v, m]), [x.float() for x in truth])


@pytest.mark.parametrize("make", [ALiBiAttention, ALiBiTransformerBlock])
def test_modules_may_be_copied_and_pickled(make: type) -> None:
    module = make(32, 4, num_kv_heads=2, qk_norm=True, learn_slopes=True, window=20)
    x = torch.randn(2, 30, 32)
    exact = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert_equal([twin(x)], [exact])
        twin.attention_norm = None
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


@every_backend
def test_threads_that_call_at_once_get_the_same_bits(backend: str) -> None:
    inputs = [draw(t=150) for _ in range(4)]
    exact = [gradients(lambda *x: loss(*x, backend=backend), leaves) for leaves in inputs]
    found: dict[tuple[int, int], list[Tensor]] = {}
    start = threading.Barrier(4)

    def work(at: int) -> None:
        start.wait()
        for turn in range(4):
            found[at, turn] = gradients(lambda *x: loss(*x, backend=backend), inputs[(at + turn) % 4])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    for (at, turn), ours in found.items():
        assert_equal(ours, exact[(at + turn) % 4])


def test_the_checkers_notice_a_bit_and_a_number() -> None:
    x = torch.rand(3) + 1
    assert_equal([x], [x.clone()])
    with pytest.raises(AssertionError, match="off by"):
        assert_equal([x], [x.nextafter(torch.tensor(9.0))])
    with pytest.raises(AssertionError, match="not close"):
        assert_close([x], [x + 1e-3])


def test_torchs_compiler_is_loaded_only_when_something_is_compiled() -> None:
    """Loading it takes as long as loading torch."""
    program = """
import sys, torch
import alibi_attn.distributed, alibi_lab.lab.experiment
from alibi_attn import ALiBiAttention, alibi_attention
x = torch.randn(1, 4, 300, 16, requires_grad=True)
alibi_attention(x, x, x).sum().backward()
ALiBiAttention(16, 4)(torch.randn(2, 5, 16))
assert "torch._dynamo" not in sys.modules
from alibi_attn.distributed import context_parallel_attention
assert "torch._dynamo" in sys.modules, "it is disabled there"
"""
    printed("-c", program)


def test_constants_are_marked_as_in_torch() -> None:
    ours, of_torch = constant_when_compiled(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(of_torch) != {}
