"""What we tell people runs: every Python block of README.md and docs/, the table of other code, every example in a docstring."""

import doctest
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from encoder_oracle import config, random_state, write_folder, write_tokenizer
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM
from typer.main import get_command

from alibi_attn import (
    ALiBiAttention,
    ALiBiPositionalBias,
    __version__,
    alibi_attention,
    alibi_attention_varlen,
    alibi_slopes,
)
from alibi_attn.cli.main import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_BLOCKS = [path for path in DOCUMENTS if "```python\n" in path.read_text("utf-8")]
BESIDE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")]
MAX_COLUMNS = 120  # of the README, which is read in terminals too
WITH_EXAMPLES = [path for path in sorted((ROOT / "alibi_attn").rglob("*.py")) if ">>> " in path.read_text("utf-8")]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line number, source) of every ```python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: block.start()].count("\n") + 2, block.group(1)) for block in found]


def assert_blocks_run(text: str, name: str) -> None:
    """The blocks of one document run in order and share their names."""
    document = types.ModuleType("__document__")
    sys.modules[document.__name__] = document  # where torch.compile looks up what a function of the document sees
    try:
        for line, source in python_blocks(text):
            exec(compile("\n" * (line - 1) + source, name, "exec"), vars(document))
    finally:
        del sys.modules[document.__name__]


def assert_links_lead_somewhere(document: Path) -> None:
    """Every link and picture that is not on the web is a file, and what stands behind a # is a heading of it."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)", prose):
        name, _, heading = "".join(target).partition("#")
        if name.startswith("https://"):
            continue
        there = document.parent / name if name else document
        assert there.exists(), f"{document.name} leads to {name}, which is not there"
        if heading:
            titles = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{document.name} leads to #{heading}, which {there.name} has not"


def write_published(folder: Path) -> None:
    """What the README loads by the names of the hub, as folders of these names: tiny, with random weights; and texts."""
    bloom = folder / "bigscience" / "bloom-560m"
    BloomForCausalLM(BloomConfig(hidden_size=48, n_layer=2, n_head=6, vocab_size=60)).save_pretrained(bloom)
    write_tokenizer(bloom)
    jina = folder / "jinaai" / "jina-embeddings-v2-base-en"
    write_tokenizer(write_folder(jina, random_state("jina"), config("jina")))
    for name, text in (("1.txt", "a b c d"), ("2.txt", "e f g " * 300)):
        (folder / "chapters").mkdir(exist_ok=True)
        (folder / "chapters" / name).write_text(text, encoding="utf-8")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("document", WITH_BLOCKS, ids=named)
def test_python_in_documents_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if document.name == "README.md":
        write_published(tmp_path)
    torch.manual_seed(0)
    assert_blocks_run(document.read_text(encoding="utf-8"), str(document))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=named)
def test_examples_in_docstrings_are_true(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    torch.manual_seed(0)
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("document", [*DOCUMENTS, *BESIDE], ids=named)
def test_links_lead_somewhere(document):
    assert_links_lead_somewhere(document)


def test_the_readme_is_not_wide():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > MAX_COLUMNS]


def test_the_documents_are_short():
    """A page that is added makes room for itself. The log of experiments does not count."""
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS if path.name != "log.md"}
    assert words.pop(ROOT / "README.md") <= 750
    assert sum(words.values()) <= 30_000


def test_the_changelog_fits_on_a_page():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 800


def test_the_page_of_commands_has_all_with_their_options():
    lines = re.findall(
        r"^alibi (\w+)(.*)$", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
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


@pytest.mark.parametrize(
    "wrong", ["[a](gone.md)", "![a](gone.svg)", '<img src="gone.png">', "[a](#elsewhere)", "[a](b.md#c)"]
)
def test_a_broken_link_is_noticed(wrong, tmp_path):
    (tmp_path / "b.md").write_text("# One, two\n", encoding="utf-8")
    document = tmp_path / "a.md"
    document.write_text(
        "## On disk\n[b](b.md#one-two) [here](#on-disk) `[c](d)` [web](https://e.org)\n", encoding="utf-8"
    )
    assert_links_lead_somewhere(document)
    document.write_text(f"## On disk\n{wrong}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="leads to"):
        assert_links_lead_somewhere(document)


CITED = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|hpp|cpp|css|json))`|`(\w+\.(?:hpp|cpp))`")


@pytest.mark.parametrize("name", ["design", "glossary", "backends", "maths", "lab"])
def test_files_that_a_page_cites_are_there(name):
    cited = {
        path for found in CITED.findall((ROOT / "docs" / f"{name}.md").read_text("utf-8")) for path in found if path
    }
    known = [path.as_posix() for path in ROOT.rglob("*.[pchj]*") if ".venv" not in path.parts]
    gone = sorted(path for path in cited if not any(there.endswith(f"/{path}") for there in known))
    assert not gone
    assert cited or name == "maths"


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


@pytest.mark.parametrize("causal", [True, False])
def test_newcomers_table_flash_attn_varlen(causal):
    """Its documented meaning: sequence b is cu[b] to cu[b + 1] of packed [N, H, D], each with the bias of its own."""
    q, k, v = torch.randn(12, 8, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    slopes, cu = torch.rand(8), torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    flash = torch.empty_like(q)
    for low, high in zip(cu.tolist(), cu[1:].tolist(), strict=False):
        distance = torch.arange(high - low)[:, None] - torch.arange(high - low)
        bias = -slopes[:, None, None] * distance.abs()
        bias = bias.masked_fill(distance < 0, float("-inf")) if causal else bias
        many = [x[low:high].repeat_interleave(4, dim=1).transpose(0, 1) for x in (k, v)]
        of_query = q[low:high].transpose(0, 1)
        flash[low:high] = F.scaled_dot_product_attention(of_query, *many, attn_mask=bias).transpose(0, 1)
    ours = alibi_attention_varlen(q, k, v, cu, slopes, causal=causal)
    torch.testing.assert_close(ours, flash, rtol=1e-5, atol=1e-6)


def test_newcomers_table_masks():
    """A mask of keys [B, 1, 1, S], boolean or of 0 and −inf, where nothing is causal, as SDPA is unless it is told."""
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    seen = torch.arange(9) < torch.tensor([9, 5])[:, None, None, None]
    added = torch.zeros(2, 1, 1, 9).masked_fill(~seen, float("-inf"))
    for mask, key_mask in ((seen, seen[:, 0, 0]), (added, added[:, 0, 0] == 0)):
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        ours = alibi_attention(q, k, v, [0.0] * 4, causal=False, key_mask=key_mask)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_newcomers_table_multihead_attention():
    theirs = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    ours = ALiBiAttention(32, 4, causal=False, slopes=[0.0] * 4)
    weights = theirs.in_proj_weight.chunk(3)
    ours.load_state_dict(
        {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
        | {"out_proj.weight": theirs.out_proj.weight}
    )
    x, padding = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([9, 5])[:, None]
    expected = theirs(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(ours(x, key_mask=~padding), expected, rtol=1e-5, atol=1e-6)


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert "arXiv:2108.12409" in citation
