"""Documents, docstrings and `--help` name every family of the tables, by the names that errors derive from them."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import alibi_attn.hf
from alibi_attn.hf import ALiBiBertModel, ALiBiForCausalLM, patch
from alibi_attn.hf.readers.families import DECODERS, ENCODERS, PATCHED
from alibi_attn.hf.readers.families.family import Family, PatchedFamily
from alibi_lab.cli.main import app

ROOT = Path(__file__).parent.parent.parent
READ_AS_TEXT = [*DECODERS, *(family for family in PATCHED if family.around is None)]
EVERY = [*ENCODERS.values(), *DECODERS, *PATCHED]


def names(families: Iterable[Family | PatchedFamily]) -> list[str]:
    """Of each family; some have several, or a condition."""
    return [name for family in families for name in re.split(" or ", family.name.partition(" with ")[0])]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def help_of(command: str) -> str:
    return CliRunner(env={"COLUMNS": "250"}).invoke(app, [command, "--help"]).output


TEXTS = {
    "docs/encoders.md": (lambda: read("docs/encoders.md"), ENCODERS.values()),
    "docs/decoders.md": (lambda: read("docs/decoders.md"), DECODERS),
    "docs/hf.md": (lambda: read("docs/hf.md"), PATCHED),
    "docs/paths.md": (lambda: read("docs/paths.md"), EVERY),
    "alibi_attn.hf": (lambda: alibi_attn.hf.__doc__, EVERY),
    "ALiBiBertModel.from_pretrained": (lambda: ALiBiBertModel.from_pretrained.__doc__, ENCODERS.values()),
    "ALiBiForCausalLM": (lambda: ALiBiForCausalLM.__doc__, DECODERS),
    "patch": (lambda: patch.__doc__, PATCHED),
    "alibi embed": (lambda: help_of("embed"), ENCODERS.values()),
    "alibi eval-text": (lambda: help_of("eval-text"), READ_AS_TEXT),
}


@pytest.mark.parametrize("place", TEXTS)
def test_every_family_is_named(place):
    text, families = TEXTS[place]
    words = " ".join(re.sub(r"[│\n]", " ", text()).split()).casefold()
    assert [name for name in names(families) if name.casefold() not in words] == []


def test_a_family_that_no_text_names_is_noticed():
    assert names(PATCHED)[0] == "BLOOM"
    assert {"MosaicBERT", "DNABERT-2", "BTLM", "Jais", "Falcon"} <= set(names(EVERY))
    assert "bloom" not in help_of("embed").casefold()
