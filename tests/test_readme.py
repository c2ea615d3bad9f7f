"""What we tell people runs: every Python block of README.md and docs/, the newcomers' table, every example in a docstring."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from typer.main import get_command

from alibi_attn import ALiBiPositionalBias, __version__, alibi_attention, alibi_slopes
from alibi_attn.cli.main import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_EXAMPLES = [path for path in sorted((ROOT / "alibi_attn").rglob("*.py")) if ">>> " in path.read_text("utf-8")]


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line number, source) of every ```python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: block.start()].count("\n") + 2, block.group(1)) for block in found]


def assert_blocks_run(text: str, name: str) -> None:
    """The blocks of one document run in order and share their names."""
    names: dict[str, object] = {"__name__": "__document__"}
    for line, source in python_blocks(text):
        exec(compile("\n" * (line - 1) + source, name, "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert_blocks_run(document.read_text(encoding="utf-8"), str(document))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_are_true(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    torch.manual_seed(0)
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_commands_in_the_readme_exist_with_their_options():
    lines = re.findall(r"^alibi (\w+)(.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {command for command, _ in lines} == set(get_command(app).commands)
    for command, rest in lines:
        found = get_command(app).commands[command]
        if command == "bench":
            found = found.commands[rest.split()[0]]
        known = {option for parameter in found.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest.split("#")[0])) <= known, command


def test_a_wrong_block_is_noticed():
    assert_blocks_run("```bash\nfalse\n```\n```python\nx = 1\n```\n```python\nassert x == 1\n```\n", "right")
    with pytest.raises(AssertionError):
        assert_blocks_run("```python\nx = 1\n```\n```python\nassert x == 2\n```\n", "wrong")


def test_newcomers_table_a_buffer_of_biases():
    scores, length = torch.randn(1, 8, 20, 20), 64
    i, j = torch.arange(length)[:, None], torch.arange(length)
    slopes = torch.tensor(alibi_slopes(8), dtype=torch.float32)[:, None, None]
    buffer = (slopes * (j - i)).masked_fill(j > i, float("-inf"))  # what a class for lengths up to 64 registers
    assert torch.equal(scores + ALiBiPositionalBias(8)(20), scores + buffer[:, :20, :20])


@pytest.mark.parametrize("window_size", [(-1, -1), (4, 0)])
def test_newcomers_table_flash_attn(window_size):
    """flash-attn needs a GPU; this is its documented meaning: layout [B, T, H, D], bias −m·|i + S − T − j|, last aligned."""
    q, k, v = torch.randn(2, 3, 8, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    slopes, left = torch.rand(2, 8), window_size[0]
    distance = torch.arange(3)[:, None] + 9 - 3 - torch.arange(9)
    hidden = (distance < 0) | ((distance > left) & (left >= 0))
    bias = (-slopes[:, :, None, None] * distance.abs()).masked_fill(hidden, float("-inf"))
    many = [x.repeat_interleave(4, dim=2).transpose(1, 2) for x in (k, v)]
    flash = F.scaled_dot_product_attention(q.transpose(1, 2), *many, attn_mask=bias).transpose(1, 2)
    window = None if left < 0 else left + 1
    ours = alibi_attention(*(x.transpose(1, 2) for x in (q, k, v)), slopes, window=window).transpose(1, 2)
    torch.testing.assert_close(ours, flash, rtol=1e-5, atol=1e-6)


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert "arXiv:2108.12409" in citation
