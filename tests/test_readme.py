"""The documentation is true: every Python block of README.md and docs/ and every example in a docstring runs."""

import doctest
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from encoder_oracle import config, random_state, write_folder, write_tokenizer
from transformers import BloomConfig, BloomForCausalLM
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from alibi_attn.nn.linear import quantized
from alibi_lab.cli.main import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_BLOCKS = [path for path in DOCUMENTS if "```python\n" in path.read_text("utf-8")]
ALSO = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")]
WITH_EXAMPLES = [path for path in sorted(ROOT.glob("alibi_*/**/*.py")) if ">>> " in path.read_text("utf-8")]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line number, source) of every ```python block."""
    matches = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: block.start()].count("\n") + 2, block.group(1)) for block in matches]


def assert_blocks_run(text: str, name: str) -> None:
    """The blocks of one document run in order, in one namespace."""
    document = types.ModuleType("__document__")
    sys.modules[document.__name__] = document  # torch.compile looks up the globals of a function here
    try:
        for line, source in python_blocks(text):
            exec(compile("\n" * (line - 1) + source, name, "exec"), vars(document))
    finally:
        del sys.modules[document.__name__]


def assert_links_have_targets(document: Path) -> None:
    """Every link and picture that is not on the web is a file, and every #anchor is a heading in it."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)", prose):
        name, _, heading = "".join(target).partition("#")
        if name.startswith("https://"):
            continue
        there = document.parent / name if name else document
        assert there.exists(), f"{document.name} links to {name}, which does not exist"
        if heading:
            titles = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{document.name} links to #{heading}, but {there.name} has no such heading"


def write_published(folder: Path) -> None:
    """Tiny models with random weights in folders named like the hub repositories of the README."""
    bloom = folder / "bigscience" / "bloom-560m"
    BloomForCausalLM(BloomConfig(hidden_size=48, n_layer=2, n_head=6, vocab_size=60)).save_pretrained(bloom)
    write_tokenizer(bloom)
    jina = folder / "jinaai" / "jina-embeddings-v2-base-en"
    write_tokenizer(write_folder(jina, random_state("jina"), config("jina")))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("document", WITH_BLOCKS, ids=named)
def test_python_in_documents_runs_and_prints_what_it_says(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if document.name == "README.md":
        write_published(tmp_path)
    torch.manual_seed(0)
    text = document.read_text(encoding="utf-8")
    assert_blocks_run(text, str(document))
    printed = capsys.readouterr().out
    assert all(said in printed for said in re.findall(r"^print\(.*\)  # ([\[(].+|True)$", text, re.MULTILINE))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=named)
def test_examples_in_docstrings_are_true(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if module == quantized.__name__:
        try:
            quantized.check_supported()
        except ValueError as error:
            pytest.skip(str(error))
    torch.manual_seed(0)
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("document", [*DOCUMENTS, *ALSO], ids=named)
def test_links_have_targets(document):
    assert_links_have_targets(document)


def test_the_documents_are_short():
    """A new page makes room for itself. The log does not count; it has its own limit."""
    counted = [path for path in DOCUMENTS if ROOT / "docs" / "log" not in (path.with_suffix(""), path.parent)]
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in counted}
    assert words.pop(ROOT / "README.md") <= 750
    assert sum(words.values()) <= 24_000
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in {*DOCUMENTS} - {*counted}) <= 8_000
    assert "\n## 20" not in log, "an entry of the log belongs on top of its month's file in docs/log/"


def test_the_changelog_fits_on_a_page():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 600


def test_the_page_of_commands_lists_all_with_valid_options():
    lines = re.findall(
        r"^alibi ([\w-]+)(.*)$", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert {command for command, _ in lines} == set(get_command(app).commands)
    for command, rest in lines:
        subcommand = get_command(app).commands[command]
        if isinstance(subcommand, TyperGroup):
            subcommand = subcommand.get_command(Context(subcommand), rest.split()[0])
        known = {option for parameter in subcommand.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest.split("#")[0])) <= known, command


def test_a_wrong_block_is_noticed():
    assert_blocks_run("```bash\nfalse\n```\n```python\nx = 1\n```\n```python\nassert x == 1\n```\n", "right")
    with pytest.raises(AssertionError):
        assert_blocks_run("```python\nx = 1\n```\n```python\nassert x == 2\n```\n", "wrong")


@pytest.mark.parametrize(
    "wrong", ["[a](gone.md)", "![a](gone.svg)", '<img src="gone.png">', "[a](#elsewhere)", "[a](b.md#c)"]
)
def test_a_broken_link_is_noticed(wrong, tmp_path):
    (tmp_path / "b.md").write_text("# One, two\n", encoding="utf-8")
    document = tmp_path / "a.md"
    document.write_text(
        "## On disk\n[b](b.md#one-two) [here](#on-disk) `[c](d)` [web](https://e.org)\n", encoding="utf-8"
    )
    assert_links_have_targets(document)
    document.write_text(f"## On disk\n{wrong}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="links to"):
        assert_links_have_targets(document)
