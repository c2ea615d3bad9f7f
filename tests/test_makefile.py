"""`make` leaves an environment alone that has the package of another checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_environment_of_another_checkout_is_refused(tmp_path: Path) -> None:
    venv, info = tmp_path / "venv", tmp_path / "alibi_attn-1.dist-info"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "installed").touch()  # or make would install, where this test finds a fault
    info.mkdir()
    (info / "METADATA").write_text("Name: alibi-attn\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "file:///another/checkout"}')
    command, path = ["make", "check", f"VENV={venv}"], {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{venv} has alibi-attn from /another/checkout" in done.stderr
