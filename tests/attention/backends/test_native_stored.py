"""Half-precision numbers as the C++ kernels read and write them: every number, by every instruction set."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

from alibi_attn.attention.backends.native import build, decoding

SOURCE = """
#include "stored.hpp"
#include "system.hpp"
template <typename Stored> INLINE void widen_all(const Stored *x, float *one_by_one, float *vectors, int64_t n) {
    for (int64_t i = 0; i < n; i++) one_by_one[i] = as_float(x[i]);
    for (int64_t i = 0; i < n; i += VL<float>) store(vectors + i, load_floats(x + i));
}
EXPORT void widen_float16(const Float16 *x, float *y, float *z, int64_t n) { widen_all(x, y, z, n); }
EXPORT void widen_bfloat16(const BFloat16 *x, float *y, float *z, int64_t n) { widen_all(x, y, z, n); }
EXPORT void narrow_float16(const float *x, Float16 *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = from_float<Float16>(x[i]);
}
EXPORT void narrow_bfloat16(const float *x, BFloat16 *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = from_float<BFloat16>(x[i]);
}
"""
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(
    scope="module", params=[("-march=native",), ("-march=native", "-mno-avx512f", "-mno-f16c")], ids=["own", "bare"]
)
def library(request, tmp_path_factory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    folder = tmp_path_factory.mktemp("stored")
    (folder / "stored.cpp").write_text(SOURCE)
    command = ["g++", *build.FLAGS, *request.param, "-shared", f"-I{build.FOLDER}", "stored.cpp", "-o", "stored.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode and "-mno" in done.stderr:
        pytest.skip("these are options of x86")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "stored.so"))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bitwise equality, including signs of zeros; all NaN are equal."""
    return bool(((bits_of(got) == bits_of(expected)) | (got.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", TYPES)
def test_every_number_is_widened_exactly(library, name):
    stored = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(TYPES[name])
    one_by_one, vectors = torch.zeros(2, 2**16)
    getattr(library, f"widen_{name}")(
        *(ctypes.c_void_p(x.data_ptr()) for x in (stored, one_by_one, vectors)), ctypes.c_int64(2**16)
    )
    assert same(one_by_one, stored.float())
    assert same(vectors, stored.float())


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_rounded_to_the_nearest_and_to_even(library, name):
    """Every number, ties and their neighbors, overflow, and numbers of all sizes."""
    dtype = TYPES[name]
    every = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(dtype).float()
    every = every[every.isfinite()]
    ordered = every.sort().values
    halfway = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    near = torch.cat([every, halfway, *(torch.nextafter(halfway, torch.tensor(end)) for end in (-np.inf, np.inf))])
    large = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 1e30, 3.4028235e38, float("inf"), float("nan")])
    drawn = torch.randn(200_000) * 2.0 ** torch.randint(-40, 20, (200_000,))
    x = torch.cat([near, large, -large, drawn]).contiguous()
    got = torch.zeros(len(x), dtype=dtype)
    getattr(library, f"narrow_{name}")(*(ctypes.c_void_p(y.data_ptr()) for y in (x, got)), ctypes.c_int64(len(x)))
    assert same(got, x.to(dtype))


@torch.no_grad()
def test_the_kernels_take_all_three():
    if decoding._library() is None:
        pytest.skip("there is no compiler")
    for dtype in (torch.float32, *TYPES.values()):
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 40), (30, 40), (30,)))
        assert decoding.takes(x, weight)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        got = decoding.linear(x, weight, bias).double()
        assert float((got - exact).abs().max()) <= torch.finfo(dtype).eps * float(exact.abs().max()) + 1e-5
    assert not decoding.takes(torch.zeros(1, 1, dtype=torch.float64))
