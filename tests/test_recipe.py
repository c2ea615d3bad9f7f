"""The conda recipe and the metadata for package indexes: both agree with pyproject.toml, and claim nothing."""

import io
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from alibi_attn import __version__

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch"}
CLAIMS = r"\b(fast|faster|fastest|best|efficient|quick|blazing|optimal|state.of.the.art|production|scalable)\b"


@pytest.fixture
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def recipe() -> dict:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Metadata:
    """That of wheels and sdists, validated."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    apply_configuration(distribution, "pyproject.toml")
    written = io.StringIO()
    distribution.metadata.write_pkg_file(written)
    return Metadata.from_email(written.getvalue(), validate=True)


def bounds(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(one.replace(" ", "", 1)) for one in requirements]
    return {CONDA_NAMES.get(one.name, one.name): str(one.specifier) for one in parsed}


def test_the_recipe_agrees_with_pyproject(recipe: dict, pyproject: dict) -> None:
    project = pyproject["project"]
    about, needs = recipe["about"], recipe["requirements"]
    assert recipe["schema_version"] == 1
    assert recipe["context"]["version"] == __version__
    assert recipe["package"] == {"name": project["name"], "version": "${{ version }}"}
    assert about["summary"] == project["description"]
    assert about["license"] == project["license"]
    assert [about["license_file"]] == project["license-files"]
    assert about["homepage"] == about["repository"] == project["urls"]["Homepage"]
    assert about["documentation"] == project["urls"]["Documentation"]
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    python = {"python": project["requires-python"]}
    assert bounds(needs["run"]) == python | bounds(project["dependencies"])
    assert bounds(needs["host"]) == python | {"pip": ""} | bounds(pyproject["build-system"]["requires"])
    extras = project["optional-dependencies"]
    optional = bounds([one for extra in ("torch", "jax", "hf") for one in extras[extra]])
    constrained = bounds(needs["run_constraints"])
    assert constrained == {name: optional[name] for name in constrained}
    assert constrained.keys() == {name for name, bound in optional.items() if bound}


def test_the_metadata_is_complete(metadata: Metadata, pyproject: dict) -> None:
    assert metadata.name == canonicalize_name(metadata.name) == "alibi-attn"
    assert str(metadata.version) == __version__
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert set(metadata.provides_extra) == set(pyproject["project"]["optional-dependencies"])
    assert all(len(label) <= 32 for label in metadata.project_urls)
    assert not [one for one in metadata.classifiers if one.startswith("License ::")], "PyPI refuses both ways at once"
    for requirement in metadata.requires_dist:
        assert requirement.url is None, "PyPI refuses direct references"


def test_names_and_summaries_claim_nothing(metadata: Metadata) -> None:
    title = re.search("^title: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    for text in (metadata.summary, *metadata.keywords, title.group(1)):
        assert not re.search(CLAIMS, text, re.IGNORECASE), text
    assert re.search(CLAIMS, "a blazing fast library", re.IGNORECASE)


def test_wrong_metadata_is_noticed() -> None:
    with pytest.raises(ExceptionGroup, match="invalid or unparsed metadata"):
        Metadata.from_email("Metadata-Version: 2.4\nName: alibi attn\nVersion: 0.1.0\n", validate=True)
