"""Rules for the tests themselves: their folders mirror the two packages, and the name of a test fits on a line."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_NAME = 80
OTHER_FOLDERS = {"support", "data"}  # modules that tests import, and files that they read


def is_folder(root: Path, folder: Path | str) -> bool:
    return any((root / package / folder).is_dir() for package in ("alibi_attn", "alibi_lab"))


def assert_tests_mirror_the_packages(root: Path) -> None:
    for path in sorted((root / "tests").rglob("test_*.py")):
        folder = path.parent.relative_to(root / "tests")
        assert is_folder(root, folder), f"{path.relative_to(root)} has no folder in alibi_attn/ or alibi_lab/"
    for path in sorted((root / "tests").iterdir()):
        mirrored = is_folder(root, path.name) or path.name in OTHER_FOLDERS
        assert mirrored or not any(path.glob("*.py")), f"tests/{path.name} has no folder in alibi_attn/ or alibi_lab/"


def assert_names_are_short(root: Path) -> None:
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                count = len(node.name)
                assert count <= MAX_NAME, (
                    f"{path.relative_to(root)}: {node.name} has {count} characters, not {MAX_NAME}"
                )


def test_tests_follow_their_rules() -> None:
    assert_tests_mirror_the_packages(ROOT)
    assert_names_are_short(ROOT)


def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    (tmp_path / "alibi_attn" / "nn").mkdir(parents=True)
    (tmp_path / "tests" / "nn").mkdir(parents=True)
    file = tmp_path / "tests" / "nn" / "test_cache.py"
    file.write_text(f"def test_{'a' * (MAX_NAME - 5)}():\n    pass\n")
    assert_tests_mirror_the_packages(tmp_path)
    assert_names_are_short(tmp_path)
    file.write_text(f"def test_{'a' * (MAX_NAME - 4)}():\n    pass\n")
    with pytest.raises(AssertionError, match="has 81 characters"):
        assert_names_are_short(tmp_path)
    file.parent.rename(tmp_path / "tests" / "layers")
    with pytest.raises(AssertionError, match=r"test_cache\.py has no folder"):
        assert_tests_mirror_the_packages(tmp_path)
