"""The distributions, wheels and an sdist: they contain exactly the package, and run when installed.

The sdist is built from the tree, the wheels from the sdist, one with a compiler and one without, and all without a network. They
are installed into fresh environments, some that see the torch that is here, one with the declared dependencies only.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from alibi_attn import __version__
from alibi_attn.attention.backends.native.build import HEADERS, SOURCES
from alibi_attn.attention.backends.native.levels import LEVELS

ROOT = Path(__file__).parent.parent
NAME = f"alibi_attn-{__version__}"
MOST_BYTES = 2_000_000  # of a package of text; not twice the current size
MOST_KERNEL_BYTES = 800_000  # of one library in a wheel, which has one per level; twice the current size
COMPILES = (platform.system(), platform.machine()) == ("Linux", "x86_64") and shutil.which("g++") is not None
KERNELS = {f"alibi_attn/attention/backends/native/kernels-{level.name}.so" for level in LEVELS} if COMPILES else set()
PLATFORM = "linux_x86_64" if COMPILES else "any"
HERE = Path(sysconfig.get_path("purelib"))
NO_COMPILER = {"PATH": "/nowhere", "CXX": ""}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]
WHERE = """
import alibi_attn
from alibi_attn.attention.backends.native import build
print(alibi_attn.__file__)
print(build.why_not())
"""
CALLS = """
import functools, pathlib, alibi_attn, torch
q, k, v = torch.randn(3, 1, 8, 800, 16, generator=torch.Generator().manual_seed(0))
truth = alibi_attn.alibi_attention(q.double(), k.double(), v.double(), backend="reference").float()
torch.testing.assert_close(alibi_attn.alibi_attention(q, k, v), truth)
print(alibi_attn.__file__)
print(*(line for line in str(alibi_attn.explain(q, k, v)).splitlines() if line.startswith(("  native", "  banded"))), sep="\\n")
"""
EVERY_LEVEL = (
    CALLS
    + """
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native.levels import LEVELS
library = build.library
for level in LEVELS:
    if level.missing:
        continue
    build.library = functools.partial(library, level)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    output = alibi_attn.alibi_attention(*given, backend="native")
    torch.testing.assert_close(output, truth)
    wide = [x.double().detach().requires_grad_() for x in given]
    gradients = torch.autograd.grad(alibi_attn.alibi_attention(*wide, backend="reference").sum(), wide)
    for ours, theirs in zip(torch.autograd.grad(output.sum(), given), gradients, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)
    print(build.instructions())
print(*{line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "omp" in line.split("/")[-1]})
"""
)
PLAIN = """
import sys, alibi_attn
assert alibi_attn.alibi_slopes(8)[0] == 0.5
print(alibi_attn.__file__)
from alibi_attn.attention.backends.native import build
print(build.why_not() or build.instructions())
try:
    alibi_attn.alibi_attention
except ImportError as error:
    print(error)
"""


class Built(NamedTuple):
    """The built distributions, from a copy of the files that git tracks or would add."""

    tree: Path
    sdist: Path
    wheel: Path
    pure: Path  # built without a compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    hook = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", hook, str(folder)], folder / "tree")
    sdist = folder / f"{NAME}.tar.gz"
    run([*PIP, "wheel", *OFFLINE, str(sdist)], folder)
    run([*PIP, "wheel", *OFFLINE, str(sdist)], folder, **NO_COMPILER)
    return Built(
        folder / "tree", sdist, folder / f"{NAME}-py3-none-{PLATFORM}.whl", folder / f"{NAME}-py3-none-any.whl"
    )


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The output of a command that runs in `folder`, without this project on its path."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "CXX") if name in os.environ}
    kept |= {"HOME": str(folder), "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(package: Path, folder: Path, *visible: Path, editable: bool = False, **environment: str) -> Path:
    """The bin folder of a new environment with the package, which also sees the packages in the folders `visible`."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python = str(programs / "python")
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (packages / "visible.pth").write_text("".join(f"{path}\n" for path in visible), encoding="utf-8")
    what = ["--editable", str(package)] if editable else [str(package)]
    run([*PIP, "--python", python, "install", *OFFLINE, "--no-compile", *what], folder, **environment)
    return programs


def declared(wheel: Path) -> set[str]:
    """The installed distributions that a plain `pip install` of the wheel requires, recursively."""
    with zipfile.ZipFile(wheel) as archive:
        told = archive.read(f"{NAME}.dist-info/METADATA").decode()
    waiting = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", told, flags=re.MULTILINE)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            try:
                asked = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for other systems
                continue
            found.add(name)
            waiting += [re.match(r"[\w.-]+", one).group() for one in asked if "extra ==" not in one]
    return found


def package_files() -> set[str]:
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "alibi_attn", "alibi_lab"], ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", ["wheel", "pure"])
def test_a_wheel_holds_the_package_its_license_and_kernels_for_every_level(kind: str, built: Built) -> None:
    wheel: Path = getattr(built, kind)
    kernels = KERNELS if kind == "wheel" else set()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        told = archive.read(f"{NAME}.dist-info/WHEEL").decode().splitlines()
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == package_files() | kernels
    needed = {f"alibi_attn/attention/backends/native/{name}" for name in (*SOURCES, *HEADERS)}
    needed |= {"alibi_attn/py.typed", "alibi_lab/py.typed"}
    needed |= {
        f"alibi_lab/report/{name}" for name in ("page.css", "page.html", "published.json", "plots/page.mplstyle")
    }
    assert needed <= names
    assert wheel.stat().st_size < MOST_BYTES + len(kernels) * MOST_KERNEL_BYTES
    assert f"Root-Is-Purelib: {str(not kernels).lower()}" in told
    assert [line for line in told if line.startswith("Tag:")] == [f"Tag: py3-none-{PLATFORM if kernels else 'any'}"]


@pytest.mark.skipif(not KERNELS, reason="a wheel that is made here has no kernels")
def test_an_installed_wheel_runs_every_level_without_a_compiler(built: Built, tmp_path: Path) -> None:
    programs = installed(built.wheel, tmp_path / "environment", HERE, **NO_COMPILER)
    work = tmp_path / "elsewhere"
    work.mkdir()
    told = run([str(programs / "python"), "-W", "error", "-c", EVERY_LEVEL], work, **NO_COMPILER)
    home, banded, native, *of_levels, openmp = told.replace(" and AMX", "").splitlines()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert banded == "  banded     can run", "native comes first"
    runs = [f"{level.words}, from the wheel" for level in LEVELS if not level.missing]
    assert of_levels == runs
    assert native == f"  native     runs (picked by auto): {runs[0]}"
    assert len(openmp.split()) == 1, "a second OpenMP would have a second pool of threads"
    assert list(work.iterdir()) == [], "nothing is compiled, and nothing kept"
    run([str(programs / "alibi"), "report", str(ROOT / "results"), "--out", str(work / "report.html")], work)
    assert "</html>" in (work / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="no C++ compiler for the kernels")
def test_a_wheel_that_was_made_without_a_compiler_compiles_on_the_first_call(built: Built, tmp_path: Path) -> None:
    programs = installed(built.pure, tmp_path / "environment", HERE)
    home, _, native = run([str(programs / "python"), "-W", "error", "-c", CALLS], tmp_path).splitlines()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert re.fullmatch(r"  native     runs \(picked by auto\): .*, compiled here", native)
    made = (path.name.split("-")[2] for path in (tmp_path / ".cache" / "alibi-attn").glob("kernels-native-*.so"))
    assert sorted(made) == ["float32", "threads"], "no more than the call needed"


def test_an_sdist_is_installed_without_a_compiler_and_says_what_runs(built: Built, tmp_path: Path) -> None:
    programs = installed(built.sdist, tmp_path / "environment", HERE, **NO_COMPILER)
    told = run([str(programs / "python"), "-W", "error", "-c", CALLS], tmp_path, **NO_COMPILER)
    home, banded, native = told.splitlines()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert banded == "  banded     runs (picked by auto)"
    assert native == (
        "  native     cannot: there is no C++ compiler (g++ or clang++); install g++ (on Debian and Ubuntu: apt install g++), "
        "or set CXX to the path of one"
    )


def test_an_editable_install_is_the_tree_and_compiles_nothing(built: Built, tmp_path: Path) -> None:
    before = files_of(built.tree)
    programs = installed(built.tree, tmp_path / "environment", HERE, editable=True)
    home, why = run([str(programs / "python"), "-c", WHERE], tmp_path, **NO_COMPILER).splitlines()
    assert Path(home).is_relative_to(built.tree)
    assert "there is no C++ compiler (g++ or clang++)" in why
    assert files_of(built.tree) == before


def files_of(tree: Path) -> set[Path]:
    """Ignores files that Python and pip create."""
    return {path for path in tree.rglob("*") if not re.search(r"egg-info|__pycache__", str(path))}


def test_an_installed_wheel_needs_no_more_than_it_declares(built: Built, tmp_path: Path) -> None:
    """The kernels do not need torch either, when JAX calls them."""
    visible = tmp_path / "declared"
    visible.mkdir()
    for name in declared(built.wheel):
        package = metadata.distribution(name)
        for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            (visible / top).symlink_to(str(package.locate_file(top)))
    programs = installed(built.wheel, tmp_path / "environment", visible)
    work = tmp_path / "elsewhere"
    work.mkdir()
    home, kernels, lacks = run([str(programs / "python"), "-W", "error", "-c", PLAIN], work, **NO_COMPILER).splitlines()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert ("from the wheel" in kernels) == bool(KERNELS)
    assert 'pip install ".[torch]" in a clone' in lacks
    assert run([str(programs / "alibi"), "--version"], work) == f"alibi-attn {__version__}\n"
    told = run([str(programs / "alibi"), "--help"], work)
    assert all(command in told for command in ("run", "recipes", "report", "bench"))
