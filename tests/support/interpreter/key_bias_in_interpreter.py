"""`key_bias` in our Triton kernels; runs in the child process with Triton's interpreter; see `fused_in_interpreter`."""

import dataclasses
import math
from collections.abc import Sequence

import device_arithmetic
import torch
from certificate_attack import dropped, native_keys, random_attack
from fused_in_interpreter import _inside
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.plan import How, planned
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.operators.schema import Arguments


def drawn(query_len: int, key_len: int, *, heads: int = 2, kv_heads: int = 1) -> list[Tensor]:
    torch.manual_seed(query_len)
    return [torch.randn(2, h, n, 16) for h, n in ((heads, query_len), (kv_heads, key_len), (kv_heads, key_len))]


def hidden_keys_change_nothing(query_len: int, bad: float) -> None:
    """Checks that keys hidden by all heads of a group change no bit of any result; one head sees nothing."""
    query, key, value = drawn(query_len, 220)
    bias = torch.where(torch.rand(2, 2, 220) < 0.1, -math.inf, torch.randn(2, 2, 220))
    bias[0, :, 40:150] = -math.inf
    bias[1, 1] = -math.inf
    spoiled = [query, key.clone(), value.clone()]
    spoiled[1][0, :, 40:150], spoiled[2][0, :, 40:150] = bad, -bad
    found = []
    for tensors in ([query, key, value], spoiled):
        leaves = [x.clone().requires_grad_() for x in (*tensors, bias)]
        output, lse = alibi_attention(*leaves[:3], key_bias=leaves[3], return_lse=True, backend="fused")
        assert bool((output[1, 1] == 0).all())
        assert bool((lse[1, 1] == -math.inf).all())
        loss = output.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
        found.append((output, lse, *torch.autograd.grad(loss, leaves)))
    for name, clean, other in zip(("output", "lse", "dq", "dk", "dv", "db"), *found, strict=True):
        assert torch.equal(clean, other), f"{bad} in a hidden key changes {name}"
        assert bool(clean.isfinite().all()) or name == "lse", name


def cost_of_large_numbers(query_len: int) -> tuple[float, float]:
    """Errors of output and lse against fp64 when 2^20 is added to every bias, in fp64."""
    query, key, value = drawn(query_len, 220)
    bias = torch.rand(2, 2, 220, dtype=torch.float64).cumsum(-1)
    exact = [x.double() for x in (query, key, value)]
    output, lse = alibi_attention(*exact, key_bias=bias, return_lse=True, tolerance=0.0, backend="reference")
    far, far_lse = alibi_attention(query, key, value, key_bias=bias + 2.0**20, return_lse=True, backend="fused")
    assert far_lse.dtype == torch.float64
    assert (
        alibi_attention(query, key, value, key_bias=bias.float(), return_lse=True, backend="fused")[1].dtype
        == torch.float32
    )
    return float((far - output).abs().max()), float((far_lse - 2.0**20 - lse).abs().max())


def gradient_of_gates(dtype: str) -> tuple[float, float]:
    """Returns the largest error of the gates' gradient against fp64, and its largest value."""
    query, key, value = (x.to(getattr(torch, dtype)) for x in drawn(200, 200))
    gates = torch.nn.functional.logsigmoid(torch.randn(2, 2, 200) + 2)
    found = []
    for wide, backend in ((False, "fused"), (True, "reference")):
        tensors = [x.double() if wide else x for x in (query, key, value)]
        leaf = gates.clone().to(torch.float64 if wide else torch.float32).requires_grad_()
        output, lse = forgetting_attention(*tensors, leaf, return_lse=True, backend=backend, tolerance=0.0)
        found.append(torch.autograd.grad(output.double().square().sum() + lse.double().sin().sum(), leaf)[0].double())
    ours, exact = found
    return float((ours - exact).abs().max()), float(exact.abs().max())


def transformed_and_checked() -> None:
    """Checks opcheck, vmap, torch.compile and a bias that broadcasts."""
    query, key, value = drawn(20, 20)
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


def attacked(seeds: Sequence[int], *, forgetful: bool = False) -> list[tuple[float, float, float]]:
    """For every draw: (dropped mass / tolerance, share of skipped keys, the same share by the C++ kernels).

    Every approximate function errs by its largest error, in the direction that shortens the reach. A `forgetful`
    certificate ignores the biases.
    """

    def visited(spec: AttentionSpec[Tensor], *tensors: Tensor) -> Tensor:
        """[B, H, T, S]: the keys in the tiles that the certificate keeps for each TILE queries."""
        bias = spec.key_bias.masked_fill(spec.key_bias > -math.inf, 0.0) if forgetful else spec.key_bias
        return _inside(spec, planned(dataclasses.replace(spec, key_bias=bias), *tensors, How(TILE))[0])

    found = []
    for seed in seeds:
        attack = random_attack(seed, biased=True)
        low = "float16" if attack.dtype == "float64" else attack.dtype
        attack = dataclasses.replace(attack, dtype=low, head_dim=attack.head_dim * (16 if seed % 4 == 0 else 1))
        theirs = 0.0 if forgetful else dropped(attack, native_keys)[1]
        with device_arithmetic.of_a_device("against us"):
            lost, share = dropped(attack, visited)
        found.append((lost / attack.tolerance, share, theirs))
    return found


def tiles_of_gates(length: int) -> tuple[int, int]:
    """Returns (most tiles visited by 128 queries, number of tiles), for steady gates plus 10⁶ on every bias."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, length, 16).unbind(0)
    bias = torch.full((1, 1, length), 0.5, dtype=torch.float64).cumsum(-1) + 1e6
    spec = make_spec(query, key, value, [0.0], key_bias=bias, tolerance=1e-6)
    bands = fused.plan(spec, query, key, value).bands
    return int((bands[..., 1] - bands[..., 0]).max()), -(-length // TILE)


def cuts_are_strict(query_len: int, bad: float) -> None:
    """Checks that no key before a cut is used, even if a mask hides all keys after the cut."""
    query, key, value = drawn(query_len, 220)
    gates = torch.nn.functional.logsigmoid(torch.randn(2, 2, 220) + 2)
    gates[:, :, 100] = gates[1, 1, 217] = -math.inf
    seen = torch.ones(2, 220, dtype=torch.bool)
    seen[0, 100:218] = False
    spoiled = key.clone(), value.clone()
    spoiled[0][0, 0, 50] = spoiled[1][1, 0, 99] = bad
    kept = slice(max(0, 100 - (220 - query_len)), None)
    found = []
    for backend, tensors in (("fused", spoiled), ("reference", (key, value))):
        leaves = [x.clone().requires_grad_() for x in (query, *tensors, gates)]
        output, lse = forgetting_attention(*leaves, key_mask=seen, return_lse=True, backend=backend)
        output, lse = output[:, :, kept], lse[:, :, kept]
        assert bool((lse[0] == -math.inf).any())
        loss = output.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
        gradients = torch.autograd.grad(loss, leaves)
        found.append([output, lse, gradients[0][:, :, kept], *(x[:, :, 101:] for x in gradients[1:])])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=2e-5)
