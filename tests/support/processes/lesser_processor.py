"""Hides features of this processor, to run the tests as on a lesser one: `pytest --processor avx2` or `--processor avx512`.

ATen, oneDNN, MKL and XLA have settings for this. The compilers become scripts that replace -march=native. /proc/cpuinfo and
torch's list of features are changed in every Python process (`lesser/sitecustomize.py`). Child processes inherit all of it.
The hidden instructions still exist, so code that uses one without asking is not noticed.
"""

import importlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from alibi_attn.attention.backends.native.levels import OF_MACHINE

LEVELS = {level.name: level for level in OF_MACHINE["x86_64"] if level.name in ("avx2", "avx512")}
# What only better processors have, in Linux's and torch's names: of AVX-512, all that -mavx512f and x86-64-v4 do not include.
BETTER = ("avx512", "avx10", "avx_vnni", "avx_ifma", "amx")
ENVIRONMENTS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    },
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512",
    },
}
COMPILER = """#!/bin/sh
for word do
    shift
    if [ "$word" = -march=native ]; then set -- "$@" {flags}; else set -- "$@" "$word"; fi
done
exec {compiler} "$@"
"""


def hide(name: str) -> tempfile.TemporaryDirectory[str]:
    """Hides what the level `name` does not include from this process and the processes that it starts.

    Ends the run where there is nothing to hide. The folder must exist until the tests have run.
    """
    listed, level = Path("/proc/cpuinfo"), LEVELS[name]
    lines = listed.read_text().splitlines() if listed.exists() else []
    present = set(next((line for line in lines if line.startswith("flags")), "").split())
    hidden = {flag for flag in present if flag.startswith(BETTER)} - level.needs
    if not hidden or not level.needs <= present:
        pytest.exit(f"this processor has no more than {level.words}: there is nothing to hide", returncode=0)
    made = tempfile.TemporaryDirectory(prefix="lesser-processor-")
    folder = Path(made.name)
    (folder / "cpuinfo").write_text(
        "\n".join(" ".join(word for word in line.split(" ") if word not in hidden) for line in lines) + "\n"
    )
    # torch writes avx512_f where Linux writes avx512f.
    (folder / "hidden").write_text(" ".join(re.sub("^avx512_?", "avx512_", flag) for flag in hidden))
    shutil.copy(Path(__file__).with_name("lesser") / "sitecustomize.py", folder)
    (folder / "bin").mkdir()
    for compiler in filter(shutil.which, ("g++", "clang++", "c++", "gcc", "cc")):
        script = folder / "bin" / compiler
        script.write_text(COMPILER.format(flags=" ".join(level.flags), compiler=shutil.which(compiler)))
        script.chmod(0o755)
    added = {"PYTHONPATH": str(folder), "PATH": str(folder / "bin")}
    for variable, value in ENVIRONMENTS[name].items():
        os.environ[variable] = " ".join(filter(None, (os.environ.get(variable), value)))
    for variable, value in added.items():
        os.environ[variable] = os.pathsep.join(filter(None, (value, os.environ.get(variable))))
    # Code that torch compiled for the whole processor crashes where its buffers are aligned for a lesser one.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    sys.path.insert(0, str(folder))
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    return made
