"""Checks the wheels and the sdist of `release/wheels.py`.

python release/check.py dist               # metadata, contents, tags, installation on every platform
python release/check.py dist --release     # also the version, the CHANGELOG, and the package from the wheel of this machine
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import libraries
from wheels import NAME, SYSTEMS

from alibi_attn import __version__

ROOT = Path(__file__).parent.parent
TOOLS = "twine", "auditwheel", "check-wheel-contents"
# The README's blocks of Python, with tiny models in place of those of the hub.
README_USES = "tests/test_readme.py::test_python_in_documents_runs_and_prints_what_it_says[README.md]"
FROM_THE_WHEEL = """
import torch
from alibi_attn import alibi_attention, explain
query, key, value = torch.randn(3, 1, 8, 1500, 64)
exact = alibi_attention(query, key, value, backend="reference")
torch.testing.assert_close(alibi_attention(query, key, value, backend="native"), exact, atol=1e-5, rtol=1e-5)
assert "from the wheel" in str(explain(query, key, value))
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", action="store_true")
    options = parser.parse_args(arguments)
    wheels = sorted(options.folder.glob(f"{NAME}-*.whl"))
    assert wheels, f"{options.folder} has no wheels; make them with `python release/wheels.py {options.folder}`"
    sdist = options.folder / f"{NAME}.tar.gz"
    _run(_tool("twine"), "check", "--strict", *map(str, (*wheels, sdist)))
    # W004: the kernels are no modules of Python, and their names cannot be imported.
    _run(_tool("check-wheel-contents"), "--ignore", "W004", *map(str, wheels))
    for wheel in wheels:
        tag = wheel.stem.split("-")[-1]
        if tag.startswith("manylinux"):
            told = _run(_tool("auditwheel"), "show", str(wheel))
            assert tag in told, f"auditwheel does not accept {wheel.name} as {tag}:\n{told}"
        with tempfile.TemporaryDirectory() as target:
            only = ["--platform", tag, "--only-binary=:all:", "--no-deps", "--no-index", "--target", target]
            _run(sys.executable, "-m", "pip", "install", "--quiet", *only, str(wheel))
            _check_libraries(sorted(Path(target).rglob("kernels-*")))
        print(f"{wheel.name}: fine", flush=True)
    if options.release:
        _check_release(options.folder)


def _check_libraries(found: list[Path]) -> None:
    assert found, "the wheel has no kernels"
    if absent := libraries.missing_tools():
        print(f"exports are not checked: {', '.join(absent)} not installed (Debian: apt install llvm)", flush=True)
        return
    for library in found:
        libraries.assert_only_kernels(library)


def _check_release(folder: Path) -> None:
    missing = [system.tag for system in SYSTEMS if not (folder / f"{NAME}-py3-none-{system.tag}.whl").exists()]
    assert not missing, f"the wheels of {missing} are missing"
    released = release_date((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
    print(f"CHANGELOG.md: {__version__}, {released or 'no date yet; the commit of the release gets it'}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        environment = Path(temporary) / "environment"
        venv.create(environment, with_pip=False)
        python = str(environment / "bin" / "python")
        purelib = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(purelib) / "visible.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")  # torch
        local = ["--no-index", "--find-links", str(folder), "--no-deps", "--ignore-installed"]
        _run(
            sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *local, f"alibi-attn=={__version__}"
        )
        _run(python, "-W", "error", "-c", FROM_THE_WHEEL, cwd=temporary, PATH="/nowhere")
        for name in ("README.md", "pyproject.toml", "docs", "tests"):  # without the package
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, Path(temporary) / name)
        _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", README_USES, cwd=temporary, PATH="/nowhere")
    print("the wheel of this machine runs, with the README's three uses", flush=True)


def release_date(changelog: str, version: str) -> str | None:
    """The date of the CHANGELOG's newest section, `## VERSION (DATE)`, which must be of this version; None before a release.

    Raises:
        AssertionError: the newest section is another one.
    """
    newest = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    title = re.fullmatch(
        rf"{re.escape(version)} \((unreleased|\d{{4}}-\d{{2}}-\d{{2}})\)", newest.group(1) if newest else ""
    )
    assert title, (
        f"the first section of CHANGELOG.md is {newest.group(1) if newest else 'missing'!r}; "
        f"it must be '## {version} (unreleased)', or have the date of the release in place of 'unreleased'"
    )
    return None if title.group(1) == "unreleased" else title.group(1)


def _tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is not installed; run pip install '.[wheels]' in a clone"
    return found


def _run(*command: str, cwd: str | None = None, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
