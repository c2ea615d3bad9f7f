"""The kernels in a wheel: `pip wheel .` compiles them for every instruction level of this machine. The rest is in pyproject.toml.

They are called through ctypes and depend on neither Python nor torch, so one wheel serves all versions of both, for example
py3-none-linux_x86_64. Without a compiler the wheel is pure, py3-none-any, and the first call compiles the kernels; an editable
install does the same. A compiler that fails ends the build. `release/wheels.py` makes the wheels of all systems on one machine.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Loads no other package.
sys.path.insert(0, str(Path(__file__).parent))
from alibi_attn.attention.backends.native import build, compiling
from alibi_attn.attention.backends.native.levels import LEVELS

FOLDER = "alibi_attn/attention/backends/native"


class BuildKernels(build_ext):
    """Plain libraries, compiled by `compiling.py`."""

    def run(self) -> None:
        """Skips builds in the source tree (editable installs), where libraries would hide every change of the sources."""
        if not self.inplace:
            super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_for_wheel(next(x for x in LEVELS if ext.name.endswith(f".{build.shipped(x).stem}")), target)
        except compiling.BuildError as error:
            raise CompileError(str(error)) from None

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of Python that Python's own extensions have."""
        return f"{fullname.replace('.', '/')}{build.SUFFIX}"


class WheelForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def kernels() -> list[Extension]:
    """A library for every level of this machine."""
    if not os.environ.get("CXX") and not any(map(shutil.which, compiling.COMPILERS)):
        return []
    sources, depends = ([f"{FOLDER}/{name}" for name in names] for names in (build.SOURCES, build.HEADERS))
    stems = [build.shipped(level).stem for level in LEVELS]
    return [Extension(f"{FOLDER.replace('/', '.')}.{stem}", sources, depends=depends) for stem in stems]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelForEveryPython})
