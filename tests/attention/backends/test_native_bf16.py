"""bf16 in the C++ kernels: with native bf16 products, on processors that have them, and widened to fp32."""

import contextlib
import ctypes
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from attention_cases import KEY_BIASES, SOME
from attention_checks import answer, assert_exact
from certificate_attack import dropped, native_keys, random_attack
from emulated_kernels import ARM_BF16, arrays_of, emulating, why_not
from torch.nn import functional

from alibi_attn import alibi_attention, alibi_slopes
from alibi_attn.attention.backends.native import build, compiling
from alibi_attn.attention.backends.native.levels import LEVELS
from alibi_attn.attention.call.bias import alibi_bias

BF16 = torch.bfloat16
TOLERANCE = torch.finfo(BF16).eps / 32
SHAPES = """
typedef unsigned char Shapes[64];
extern "C" __attribute__((target("amx-tile"))) void set_shapes(Shapes *to) { asm volatile("ldtilecfg %0" : : "m"(*to)); }
extern "C" __attribute__((target("amx-tile"))) void get_shapes(Shapes *to) { asm volatile("sttilecfg %0" : "=m"(*to)); }
"""
UNIT = 2.0**-8  # half the distance from 1 to the next number


@contextlib.contextmanager
def compiled_with(flag: str) -> Iterator[None]:
    """Kernels of this processor with one more flag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, flag))
        build._found.cache_clear()
        yield
    build._found.cache_clear()


@pytest.fixture(params=["as bf16", "as fp32", pytest.param("as fp32, all else", marks=pytest.mark.long)])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With all instructions of this processor; with AVX2, as compiled by `test_native_levels`; with all but bf16's."""
    is_changed = request.param != "as bf16" and _is_x86()
    of_avx2 = is_changed and request.param == "as fp32" and not LEVELS[-1].missing
    if of_avx2:
        monkeypatch.setattr(build, "library", functools.partial(build.library, LEVELS[-1]))
    with compiled_with("-mno-avx512bf16") if is_changed and not of_avx2 else contextlib.nullcontext():
        yield request.param


@pytest.fixture(
    scope="module",
    params=["here", *(pytest.param(name, marks=pytest.mark.long) for name in ("here, without AMX", "emulated Arm"))],
)
def in_bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On this processor, also without its tiles, and on an emulated one with other instructions for bf16."""
    if request.param == "here":
        if not build.multiplies_bf16():
            pytest.skip("this processor has no products of bf16")
        yield
        return
    if request.param == "here, without AMX":
        if not _has_tiles():
            pytest.skip("this processor has no AMX")
        with compiled_with("-DALIBI_WITHOUT_AMX"):
            assert build.multiplies_bf16()
            assert not _has_tiles()
            yield
        return
    if reason := why_not(ARM_BF16):
        pytest.skip(reason)
    with emulating(ARM_BF16, tmp_path_factory.mktemp("emulated")):
        yield


def _has_tiles() -> bool:
    return " and AMX" in build.instructions()


def _is_x86() -> bool:
    return "__x86_64__" in compiling.run(compiling.compiler(None), "-dM", "-E", "-x", "c++", "/dev/null").decode()


def draw(h: int = 4, k: int = 4, t: int = 300, d: int = 64, b: int = 1) -> list[torch.Tensor]:
    shapes = [(b, heads, t, d) for heads in (h, k, k, h)]
    return [torch.randn(shape).to(BF16) for shape in shapes]


def results(tensors: list[torch.Tensor], dtype: torch.dtype, slopes: list[float], **call: object) -> list[torch.Tensor]:
    """Output, lse and the gradients of query, key, value and slopes."""
    *inputs, grad = (x.to(dtype) for x in tensors)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [*(x.requires_grad_() for x in inputs), torch.tensor(slopes, dtype=wide, requires_grad=True)]
    output, lse = alibi_attention(*leaves, return_lse=True, **{"backend": "native", **call})
    return [
        output.detach(),
        lse.detach(),
        *torch.autograd.grad([output, lse.sin()], leaves, [grad, torch.ones_like(lse)]),
    ]


def share_of_largest(found: list[torch.Tensor], true: list[torch.Tensor]) -> list[float]:
    return [float((x.double() - y.double()).abs().max() / y.abs().max()) for x, y in zip(found, true, strict=True)]


def test_both_ways_give_the_definition(products: str) -> None:
    if products != "as bf16":
        assert not build.multiplies_bf16()
    for case in (*SOME, KEY_BIASES[0]):
        assert_exact(case, BF16, answer(case, BF16, backend="native"), tolerance=TOLERANCE)


def test_a_processor_that_has_the_instruction_uses_it() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("only Linux lists what a processor can")
    has = set(flags.read_text().split())
    assert build.multiplies_bf16() == (not {"avx512_bf16", "bf16"}.isdisjoint(has))
    assert _has_tiles() == ({"avx512_bf16", "amx_tile", "amx_bf16"} <= has)


def test_the_tiles_of_other_libraries_keep_their_shapes(tmp_path: Path) -> None:
    """A library that sets them once per thread, such as llama.cpp, would otherwise end in an illegal instruction."""
    if not _has_tiles():
        pytest.skip("this processor has no AMX")
    source, built = tmp_path / "shapes.cpp", tmp_path / "shapes.so"
    source.write_text(SHAPES)
    subprocess.run([*compiling.compiler(None), "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    other, found = ctypes.CDLL(str(built)), ctypes.create_string_buffer(64)
    for palette in (1, 0):  # in use, and not
        shapes = bytes([palette, *[0] * 15, 32 * palette, *[0] * 31, 8 * palette, *[0] * 15])
        other.set_shapes(shapes)
        for tensor in draw(t=130):
            alibi_attention(tensor, tensor, tensor, [1.0, 0.5, 0.1, 0.0], backend="native")
        other.get_shapes(found)
        assert found.raw == shapes


@pytest.mark.parametrize("length", [1, 2, 31, 33, 63, 64, 65, 127, 129, 200])
@pytest.mark.parametrize("head_dim", [1, 16, 40, 128])
def test_odd_lengths_and_heads_equal_fp32_of_the_same_numbers(in_bf16: None, length: int, head_dim: int) -> None:
    """Keys are processed in pairs, in backward queries too: odd counts leave one without a partner, also in chunks."""
    tensors = draw(h=2, k=1, t=length, d=head_dim)
    for call in ({}, {"causal": False, "window": 50}, {"query_offset": 7}, {"query_offset": -5, "causal": False}):
        ours, wide = (results(tensors, dtype, [0.3, 0.07], **call) for dtype in (BF16, torch.float32))
        off = share_of_largest(ours, wide)
        # Outputs and gradients are rounded once as results and once as weights or ds; lse and slopes are not rounded.
        assert max(off[:1] + off[2:5]) <= 6 * UNIT, (call, off)
        assert off[1] <= 1e-5


def test_errors_are_those_of_the_fused_function_of_torch(in_bf16: None) -> None:
    """Compared with a dense bf16 bias in torch: the largest error and the root mean square, against float64."""
    tensors, slopes = draw(t=500), alibi_slopes(4)
    bias = alibi_bias(slopes, 500, 500)[None]

    def found(attention: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        *leaves, grad = (x.to(dtype).requires_grad_() for x in tensors)
        output = attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.detach())]

    theirs = found(lambda *x: functional.scaled_dot_product_attention(*x, attn_mask=bias.to(BF16)), BF16)
    ours = found(lambda *x: alibi_attention(*x, slopes, backend="native"), BF16)
    true = found(lambda *x: alibi_attention(*x, slopes, backend="reference"), torch.float64)
    for x, y, exact in zip(ours, theirs, true, strict=True):
        off, other = ((z.double() - exact).abs() for z in (x, y))
        assert off.square().mean() <= 1.5**2 * other.square().mean()
        assert off.max() <= 1.5 * other.max()


def test_weights_are_rounded_and_their_sum_is_not(in_bf16: None) -> None:
    """One key of weight 1 and many of 2^-9 each: rounding loses nothing here; lse is that of fp32."""
    k = torch.zeros(1, 1, 513, 16)
    k[..., 1:, 0] = -9 * 0.69314718
    k = k.to(BF16)
    q, v = torch.ones_like(k[:, :, :1]), torch.ones_like(k)
    output, lse = alibi_attention(q, k, v, [0.0], scale=1.0, return_lse=True, backend="native", causal=False)
    true = torch.logsumexp((q.double() @ k.double().mT), -1)
    assert float((lse - true).abs().max()) < 1e-6
    assert float((output - 1).abs().max()) <= 2 * UNIT


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("size", [2.0**-133, 2.0**-126, 1e-30, 1e15, 1e38])
def test_the_smallest_and_the_largest_numbers_do_what_they_do_in_fp32(in_bf16: None, size: float, which: int) -> None:
    """Values below 2^-126 count as 0, in products and results; nothing else is lost, and nothing is NaN."""
    tensors = draw(h=2, k=2, t=150, d=32)[:3]
    tensors[which] = (tensors[which].float() / 4 * size).to(BF16)
    ours, wide = (
        alibi_attention(*(x.to(dtype) for x in tensors), [0.3, 0.01], backend="native").double()
        for dtype in (BF16, torch.float32)
    )
    assert bool(ours.isfinite().all())
    assert float((ours - wide).abs().max()) <= 4 * UNIT * float(tensors[2].double().abs().max()) + 2.0**-125


def test_gradients_of_slopes_are_of_what_was_not_rounded(in_bf16: None) -> None:
    """At 3,000 tokens of bf16 numbers, as accurate as the fp32 kernels, except for the rounded output."""
    tensors = draw(h=2, k=2, t=3000, d=32)
    ours, true = results(tensors, BF16, [0.1, 0.01]), results(tensors, torch.float64, [0.1, 0.01])
    assert share_of_largest(ours[5:], true[5:])[0] < 1e-2


def test_dropped_mass_stays_within_the_tolerance_of_random_attacks(in_bf16: None) -> None:
    skipping = 0
    for seed in range(120):
        attack = random_attack(seed, bf16=True)
        lost, share = dropped(attack, native_keys)
        assert lost <= attack.tolerance, attack
        skipping += share > 0
    assert skipping >= 40, "an attack on nothing: too few draws skip a key"


def test_the_driver_of_emulated_kernels_has_a_size_for_every_array() -> None:
    """It runs only where zig and qemu are installed, so a new array of a call would be missed."""
    call = build.Call(**dict.fromkeys("BHKTSD", 1), dropout_runs=1, distances=1)
    for name in build.Call.ROWS:
        setattr(call, name, build.Rows(at=1))
    for name in build.Call.ARRAYS:
        setattr(call, name, 1)
    sizes = {array.name: array.size for array in arrays_of(call, 4, 4)}
    assert sizes.keys() == {*build.Call.ROWS, *build.Call.ARRAYS}
    assert min(sizes.values()) > 0
