"""`make` never replaces the package in an environment that another checkout uses, unless `make setup` is called."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def environment(folder: Path, source: str | None) -> Path:
    """A folder like a virtual environment with the package from `source`; its Python records calls of pip only."""
    site, venv = folder / "site", folder / "venv"
    (venv / "bin").mkdir(parents=True)
    if source is not None:
        info = site / "alibi_attn-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alibi-attn\nVersion: 0.1.0\n", encoding="utf-8")
        (info / "direct_url.json").write_text(f'{{"url": "file://{source}", "dir_info": {{}}}}', encoding="utf-8")
    python = venv / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pip"*) echo pip >> {folder}/pip; exit 0;; *-m*) exit 0;; esac\n'
        f'PYTHONPATH={site} exec {sys.executable} -S "$@"\n',
        encoding="utf-8",
    )
    for name in ("ruff", "mypy"):
        (venv / "bin" / name).write_text("#!/bin/sh\n", encoding="utf-8")
    for tool in (venv / "bin").iterdir():
        tool.chmod(0o755)
    return venv


def make(target: str, venv: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["check", "docs", "format", "clean"])
def test_an_environment_of_another_checkout_is_refused(target, tmp_path):
    venv = environment(tmp_path, "/another/checkout")
    done = make(target, venv)
    assert done.returncode == 2
    assert f"{venv} has alibi-attn from /another/checkout" in done.stderr
    assert f"make setup VENV={venv}" in done.stderr
    assert not (tmp_path / "pip").exists()
    assert (venv / "bin" / "python").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("target", "source"), [("check", None), ("check", str(ROOT)), ("setup", "/another/checkout")])
def test_an_environment_without_the_package_or_with_this_one_is_set_up(target, source, tmp_path):
    done = make(target, environment(tmp_path, source))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pip").exists()
