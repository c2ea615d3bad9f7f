"""The kernels in a wheel: `pip wheel .` compiles them for every level of instructions of x86-64. All else is in pyproject.toml.

They are called through ctypes and know neither Python nor torch, so one wheel serves all versions of both: py3-none-linux_x86_64.
On other systems, and where CXX names nothing and there is no g++, the wheel is the pure one, py3-none-any, whose kernels are
compiled on the first call; so they are in an editable install. A compiler that fails, or is not GCC, ends the build.
"""

import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# What the first call compiles with; it loads no other package.
sys.path.insert(0, str(Path(__file__).parent))
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.levels import LEVELS

FOLDER = "alibi_attn/attention/backends/native"


class BuildKernels(build_ext):
    """Plain libraries, by the commands of `build.py`."""

    def run(self) -> None:
        """Nothing in the source tree, editable installs among that: there they would hide every change of the sources."""
        if not self.inplace:
            super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_for_wheel(ext.sources, ext.extra_compile_args, target)
        except build.BuildError as error:
            raise CompileError(str(error)) from None

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of Python that its own extensions have."""
        return f"{fullname.replace('.', '/')}.so"


class WheelForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def kernels() -> list[Extension]:
    """What a wheel that is made here holds: a library for every level."""
    has_levels = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    if not has_levels or not (os.environ.get("CXX") or shutil.which("g++")):
        return []
    sources = [f"{FOLDER}/{name}" for name in build.SOURCES]
    return [
        Extension(
            f"{FOLDER.replace('/', '.')}.{build.shipped(level).stem}",
            sources,
            depends=[f"{FOLDER}/{name}" for name in build.HEADERS],
            extra_compile_args=[*build.FLAGS, *level.flags],
        )
        for level in LEVELS
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelForEveryPython})
