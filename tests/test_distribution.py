"""What is given away, a wheel and an sdist: all of the package and nothing else, and it runs where it is installed.

The sdist is built from the tree, the wheel from the sdist, and both without a network; the wheel is installed into fresh
environments, one that sees the torch that is here, one with the declared dependencies only.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from alibi_attn import __version__
from alibi_attn.attention.backends.native.build import HEADERS, SOURCES

ROOT = Path(__file__).parent.parent
NAME = f"alibi_attn-{__version__}"
BESIDE = {
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.cfg",
    "PKG-INFO",
}
MOST_BYTES = 1_000_000  # of a package of text; twice what it is
NATIVE = """
import alibi_attn, torch
q, k, v = torch.randn(3, 1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
answers = [alibi_attn.alibi_attention(q, k, v, [0.5, 0.1], backend=backend) for backend in ("native", "reference")]
torch.testing.assert_close(*answers)
print(alibi_attn.__file__)
"""
PLAIN = """
import sys, alibi_attn
assert alibi_attn.alibi_slopes(8)[0] == 0.5
print(alibi_attn.__file__)
try:
    alibi_attn.alibi_attention
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel), made from a copy of what git knows or would add."""
    folder = tmp_path_factory.mktemp("built")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    hook = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run([sys.executable, "-c", hook, "build_sdist", str(folder)], folder / "tree")
    sdist = folder / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run([sys.executable, "-c", hook, "build_wheel", str(folder)], folder / NAME)
    return sdist, folder / f"{NAME}-py3-none-any.whl"


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What the command prints, without this project on its path."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "CXX") if name in os.environ}
    kept |= {"HOME": str(folder), "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(wheel: Path, folder: Path, *visible: Path) -> Path:
    """The folder of programs of a new environment that has the wheel, and sees the packages in the folders `visible`."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python = str(programs / "python")
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (packages / "visible.pth").write_text("".join(f"{path}\n" for path in visible), encoding="utf-8")
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            str(wheel),
        ],
        folder,
    )
    return programs


def declared(wheel: Path) -> set[str]:
    """The installed distributions that a plain `pip install` of the wheel brings, with theirs."""
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
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "alibi_attn"], ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


@pytest.mark.long
def test_a_wheel_holds_the_package_and_its_license(built):
    wheel = built[1]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == package_files()
    needed = {f"alibi_attn/attention/backends/native/{name}" for name in (*SOURCES, *HEADERS)}
    needed |= {
        f"alibi_attn/{name}" for name in ("py.typed", "report/page.css", "report/page.html", "report/published.json")
    }
    assert needed <= names
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.long
def test_an_sdist_holds_what_a_wheel_is_built_from(built):
    with tarfile.open(built[0]) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames() if archive.getmember(name).isfile()}
    about = {name for name in names if name.startswith("alibi_attn.egg-info/")}
    assert names - about == package_files() | BESIDE
    assert built[0].stat().st_size < MOST_BYTES


@pytest.mark.long
@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="no C++ compiler for the kernels")
def test_an_installed_wheel_compiles_its_kernels_and_reports(built, tmp_path):
    programs = installed(built[1], tmp_path / "environment", Path(sysconfig.get_path("purelib")))
    work = tmp_path / "elsewhere"
    work.mkdir()
    home = run([str(programs / "python"), "-W", "error", "-c", NATIVE], work, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert Path(home.strip()).is_relative_to(tmp_path / "environment")
    assert len(list((tmp_path / "cache" / "alibi-attn").glob("*.so"))) == 1
    run([str(programs / "alibi"), "report", str(ROOT / "results"), "--out", str(work / "report.html")], work)
    assert "</html>" in (work / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_an_installed_wheel_needs_no_more_than_it_declares(built, tmp_path):
    visible = tmp_path / "declared"
    visible.mkdir()
    for name in declared(built[1]):
        package = metadata.distribution(name)
        for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            (visible / top).symlink_to(str(package.locate_file(top)))
    programs = installed(built[1], tmp_path / "environment", visible)
    work = tmp_path / "elsewhere"
    work.mkdir()
    home, lacks = run([str(programs / "python"), "-W", "error", "-c", PLAIN], work).splitlines()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert 'pip install "alibi-attn[torch]"' in lacks
    assert run([str(programs / "alibi"), "--version"], work) == f"alibi-attn {__version__}\n"
    told = run([str(programs / "alibi"), "--help"], work)
    assert all(command in told for command in ("run", "recipes", "report", "bench"))
