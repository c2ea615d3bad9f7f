"""The conda recipe and the metadata for package indexes: both agree with pyproject.toml, and claim nothing."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from alibi_attn import __version__

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch"}


@pytest.fixture
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def recipe() -> dict:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))


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
