"""The kernels at every instruction level: their results, warning-free compilation, and selection in a wheel."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_cases import CASES
from attention_checks import answer, assert_exact
from differential_calls import draw
from differential_fuzz import fuzz

from alibi_attn import explain
from alibi_attn.attention.backends.native import build, levels
from alibi_attn.attention.backends.native.levels import LEVELS, NATIVE, V2, V3, V4, Level
from alibi_attn.processor import features

TOLERANCE = {torch.float32: 2.0**-23 / 32, torch.float64: 2.0**-52 / 32}
SSE2 = Level("sse2", "SSE2", ("-march=x86-64",), frozenset())  # below those that a wheel has, for vectors of 16 bytes
# Each level is compiled, which takes half a minute of a processor. The short list has this machine's, which others use too.
SHORT_LIST = (NATIVE,)
LONG_LIST = (SSE2, *LEVELS) if platform.machine() == "x86_64" else ()
ANSWERS = 'const char *alibi_instructions() {{ return "{}"; }} const char *alibi_built_with() {{ return "{}"; }}'


@pytest.fixture(
    params=[*SHORT_LIST, *(pytest.param(x, marks=pytest.mark.long) for x in LONG_LIST)], ids=lambda level: level.name
)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Level:
    """Runs every call in the test at this level."""
    if request.param.missing:
        pytest.skip(f"this processor lacks {', '.join(request.param.missing)}")
    monkeypatch.setattr(build, "library", functools.partial(build.library, request.param))
    return request.param


def test_every_level_gives_the_definition(level: Level) -> None:
    """Equal to the definition up to rounding, so all levels agree."""
    assert level is NATIVE or build.instructions().replace(" and AMX", "") == f"{level.words}, compiled here"
    for dtype in (torch.float32, torch.float64):
        for case in CASES:
            assert_exact(case, dtype, answer(case, dtype, backend="native"), tolerance=TOLERANCE[dtype])


@pytest.mark.long
def test_every_level_answers_random_calls(level: Level) -> None:
    # Sums with products beyond fp32 are finite with FMA only, which torch, the reference of such calls, uses.
    seeds = [seed for seed in range(500, 600) if level is not SSE2 or not draw(seed).is_huge]
    failures = [words for seed in seeds for _, words in fuzz(["native"], range(seed, seed + 1))["native"].failures]
    assert not failures, "\n".join(failures)


def test_explain_says_which_instructions_run(level: Level) -> None:
    tensors = torch.randn(3, 1, 8, 1500, 64)
    assert f"native     runs (picked by auto): {build.instructions()}\n" in str(explain(*tensors))
    of_bf16 = explain(*(x.bfloat16() for x in tensors)).verdicts["native"]
    assert ("prefer fp32" in of_bf16) == build.instructions().startswith("AVX2,")
    assert f"native     runs (named by the caller): {build.instructions()}\n" in str(
        explain(*tensors, backend="native")
    )
    assert "dense      runs (named by the caller)\n" in str(explain(*tensors, backend="dense"))


COMPILERS = [
    pytest.param(compiler, level, id=f"{compiler}-{level.name}", marks=() if level is NATIVE else pytest.mark.long)
    for compiler in ("g++", "clang++")
    for level in (*SHORT_LIST, *LONG_LIST)
]


@pytest.mark.parametrize(("compiler", "level"), COMPILERS)
def test_compilers_have_no_warnings_about_the_sources(compiler: str, level: Level, tmp_path: Path) -> None:
    """The short list parses only, each part; the long one optimizes all of them, since the optimizer has warnings too."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}; Debian's is in the package {compiler.rstrip('+')}")
    warnings = "-fsyntax-only" if level is NATIVE else "-O3", "-Wall", "-Wextra", "-Wpedantic", "-Werror"
    parts = [(0, source) for source in build.SOURCES]
    if level is NATIVE:
        parts += [(part.number, source) for part in build.PARTS.values() for source in (*part.sources, "library.cpp")]
    for number, source in parts:
        flags = *build.FLAGS, *level.flags, *warnings, f"-DALIBI_PART={number}"
        command = [compiler, *flags, "-c", str(build.FOLDER / source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


NAMED_OTHERWISE = {
    "abm": "LZCNT",
    "avx512_bf16": "AVX512BF16",
    "bmi1": "BMI",
    "cx16": "GCC_HAVE_SYNC_COMPARE_AND_SWAP_16",
    "lahf_lm": "LAHF_SAHF",
    "pni": "SSE3",
}


def macros(*flags: str) -> set[str]:
    """The compiler's macros for the instructions that it may use."""
    command = ["g++", *flags, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[1].strip("_") for line in done.stdout.splitlines()}


@pytest.mark.skipif(not LONG_LIST, reason="x86-64 has these levels")
def test_a_level_needs_what_its_flags_allow_the_compiler() -> None:
    here, own = features(), macros("-march=native")
    for level in LEVELS:
        needs, allowed = {NAMED_OTHERWISE.get(name, name.upper()) for name in level.needs}, macros(*level.flags)
        assert needs <= allowed
        assert {name for name in allowed if name.startswith(("AVX", "SSE4", "SSSE", "FMA", "BMI", "LZCNT"))} <= needs
        for name in level.needs & here:  # by Linux's names
            assert NAMED_OTHERWISE.get(name, name.upper()) in own
        assert bool(level.missing) == (not needs <= own), "a name that Linux does not write leaves a level out"


class Wheel:
    """A folder in place of the package's, with libraries that report their level."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, level: Level, *flags: str, tile: int = build.FOR_CPP["TILE"], more: str = "") -> None:
        constants = "".join(f"ALIBI_{name}={value!r} " for name, value in (build.FOR_CPP | {"TILE": tile}).items())
        functions = "".join(f"void {name}(void *) {{}}\n" for name in build.FUNCTIONS)
        functions += "long alibi_multiplies_bf16() { return 0; }\n"
        bytes_of_call = f"long alibi_call_bytes() {{ return {ctypes.sizeof(build.Call)}; }}"
        source = self.folder / "small.cpp"
        source.write_text(
            f'extern "C" {{\n{functions}{bytes_of_call}{ANSWERS.format(level.words, constants)}{more}\n}}\n'
        )
        objects = self.folder / "small.o"
        subprocess.run(["g++", *flags, "-fPIC", "-c", str(source), "-o", str(objects)], check=True)
        subprocess.run(["g++", "-shared", str(objects), "-o", str(build.shipped(level))], check=True)

    def runs_on(self, *has: str) -> str:
        build._found.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(levels, "features", lambda: frozenset(has))
            return build.why_not() or build.instructions()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheel]:
    """Without a compiler."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    build._found.cache_clear()
    yield Wheel(tmp_path)
    build._found.cache_clear()


def test_a_wheel_s_kernels_are_picked_by_what_the_processor_has(wheel: Wheel) -> None:
    for level in LEVELS:
        wheel.add(level)
    assert wheel.runs_on(*V4, "avx512_bf16", "amx_bf16") == "AVX512-BF16, from the wheel"
    assert wheel.runs_on(*V4) == "AVX-512, from the wheel"
    assert wheel.runs_on(*V4 - {"avx512vl"}, "avx512_bf16") == "AVX2, from the wheel"
    assert wheel.runs_on(*V3) == "AVX2, from the wheel"
    for older in (V3 - {"avx2"}, V2, ()):
        assert "CXX names the C++ compiler 'no-such-compiler'" in wheel.runs_on(*older)
    build.shipped(LEVELS[0]).unlink()
    assert wheel.runs_on(*LEVELS[0].needs) == "AVX-512, from the wheel"


@pytest.mark.parametrize(("listed", "words"), [("bf16 ", "NEON-BF16"), ("", "NEON")])
def test_on_arm_the_processor_decides_between_the_kernels_of_a_wheel(
    listed: str, words: str, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Linux's list; where there is none, as on macOS, by the list of the library itself."""
    monkeypatch.setattr(build, "LEVELS", levels.OF_MACHINE["aarch64"])
    answer = f'extern "C" const char *alibi_processor_features() {{ return "{listed}"; }}'
    wheel.add(build.LEVELS[0], more=answer)
    wheel.add(build.LEVELS[1])
    assert wheel.runs_on("asimd", "bf16") == "NEON-BF16, from the wheel"
    assert wheel.runs_on("asimd") == "NEON, from the wheel"
    monkeypatch.setattr(build, "features", frozenset)
    assert wheel.runs_on() == f"{words}, from the wheel"


def test_a_requested_level_is_not_replaced_by_another(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.add(LEVELS[2])
    monkeypatch.setattr(levels, "features", lambda: V3)
    assert build.library(LEVELS[2]).alibi_instructions() == b"AVX2"
    with pytest.raises(
        build.BuildError, match=r"AVX-512 kernels cannot run here: this processor does not have avx512bw, .*avx512vl$"
    ):
        build.library(LEVELS[1])


def test_a_wheel_s_kernels_that_are_of_another_version_or_damaged_are_refused(wheel: Wheel) -> None:
    wheel.add(LEVELS[2], tile=32)
    assert "the kernels were built with the wrong constants: ALIBI_TILE=32 " in wheel.runs_on(*V3)
    build.shipped(LEVELS[1]).write_bytes(b"nothing")
    assert "the compiled kernels cannot be loaded: " in wheel.runs_on(*V4)


def test_without_cpuinfo_the_kernels_of_a_wheel_report_the_processor(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: the library of a level lists what this processor supports."""
    answer = 'extern "C" const char *alibi_processor_features() {{ return "{} "; }}'
    wheel.add(LEVELS[1], more=answer.format(" ".join(V3)))
    wheel.add(LEVELS[2], more=answer.format(" ".join(V3)))
    monkeypatch.setattr(build, "features", frozenset)
    assert wheel.runs_on() == "AVX2, from the wheel"


@pytest.mark.skipif(not LONG_LIST, reason="only x86-64 has features that differ between processors of a wheel")
def test_the_processor_reports_the_features_that_linux_lists(request: pytest.FixtureRequest) -> None:
    listing = build.library(part="threads").alibi_processor_features
    listing.restype = ctypes.c_char_p
    if request.config.option.processor:
        pytest.skip("--processor hides features from Linux's list, not from the processor's")
    assert set(listing().decode().split()) == features() & LEVELS[0].needs
