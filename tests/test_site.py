"""`make docs` builds the site without a warning, and a broken link fails it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason='the site needs Sphinx, MyST and furo: pip install ".[docs]" in a clone',
)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Runs the Makefile's command with another output folder."""
    line = re.search(
        r"^\t\$\(BIN\)/python -m (sphinx .*) docs build/site$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    command = [sys.executable, "-m", *line.group(1).split(), str(source), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.long
@needs_sphinx
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    done = build(ROOT / "docs", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    sources = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    assert sources <= pages
    for page in sources:
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"([^\"]+)", text)
        assert loaded
        assert not [address for address in loaded if "//" in address], page
    attention = (tmp_path / "site" / "api" / "attention.html").read_text(encoding="utf-8")
    assert 'id="alibi_attn.alibi_attention"' in attention
