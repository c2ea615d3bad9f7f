"""Every folder's imports are declared in the core's dependencies or in the extras that its errors name."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The extras of each folder; other code may import the core's dependencies only.
EXTRAS = {
    **dict.fromkeys(("attention", "nn", "distributed"), ("torch",)),
    "jax": ("jax",),
    "hf": ("hf", "embed", "index", "ray"),
    **dict.fromkeys(("flash_attn.py", "inspect.py"), ("torch",)),
    "lab": ("lab", "track", "hub", "ray"),
    "recipes": ("lab", "hf"),
    "report": ("lab",),
    "heads": ("torch", "hf", "lab"),
    "measure": ("torch", "jax", "hf", "lab"),
    "cli": ("torch", "jax", "hf", "lab", "ray"),
}
UNDECLARED = {
    "pandas": "of users who want records as a frame; `records.rows` needs nothing",
    "triton": "comes with torch's builds for GPUs, the only ones that need it",
    **dict.fromkeys(
        ("flash_attn", "llama_cpp", "cyllama", "ctranslate2", "gguf", "onnxruntime"),
        "of a peer that a benchmark measures where a user has it",
    ),
}
OF_TOOLS = {"dev", "docs", "notebooks", "onnx", "wheels"}
NOT_IMPORTED = {
    "tensorboard": "torch writes its files, accelerate asks for it",
    "wandb": "accelerate logs to it",
    "lancedb": "an example searches what `alibi embed --chunks` writes",
}


def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(told: dict, *extras: str) -> set[str]:
    """The packages of the core and these extras, by import name, which here equals the package name."""
    found: set[str] = set()
    for line in [*told["dependencies"], *(line for extra in extras for line in told["optional-dependencies"][extra])]:
        name, inner = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?.*", line).groups()
        found |= declared(told, *inner.split(",")) if name == "alibi-attn" else {name.lower().replace("-", "_")}
    return found


def imported(path: Path) -> set[str]:
    """The packages that a module imports, except the standard library and our own."""
    dotted: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dotted += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dotted.append(node.module)
    return {name.split(".")[0] for name in dotted} - {*sys.stdlib_module_names, "alibi_attn", "alibi_lab"}


def assert_what_is_imported_is_declared_and_no_more(root: Path) -> None:
    told = project(root)
    known = {folder: declared(told, *extras) for folder, extras in EXTRAS.items()}
    unused = declared(told, *(extra for extra in told["optional-dependencies"] if extra not in OF_TOOLS))
    unused -= {*NOT_IMPORTED}
    for path in sorted(root.glob("alibi_*/**/*.py")):
        folder, names = path.relative_to(root).parts[1], imported(path)
        unknown = names - known.get(folder, declared(told)) - {*UNDECLARED}
        where = f"the core or an extra of {', '.join(EXTRAS[folder])}" if folder in EXTRAS else "the core"
        assert not unknown, (
            f"{path.relative_to(root)} imports {sorted(unknown)}: it must be declared in {where} of pyproject"
        )
        unused -= names
    assert not unused, f"pyproject.toml declares {sorted(unused)}, which nothing imports"


def test_the_package_declares_exactly_its_imports() -> None:
    assert_what_is_imported_is_declared_and_no_more(ROOT)


def test_the_extras_are_those_of_the_folders_and_of_the_tools() -> None:
    assert set(project(ROOT)["optional-dependencies"]) == {x for extras in EXTRAS.values() for x in extras} | OF_TOOLS


def test_the_pythons_are_named_one_by_one_from_the_oldest_on() -> None:
    told = project(ROOT)
    named = [line.rpartition(" ")[2] for line in told["classifiers"] if ":: Python :: 3" in line]
    assert named[0] == told["requires-python"].removeprefix(">=")
    assert all(re.fullmatch(r"3\.\d+", name) for name in named)


def made_up(root: Path, path: str, source: str) -> Path:
    told = 'dependencies = ["numpy>=1"]\n[project.optional-dependencies]\n'
    extras = {extra: [] for extras in EXTRAS.values() for extra in extras} | {"dev": ["ruff"]}
    extras |= {"torch": ["torch>=2"], "hf": ["alibi-attn[torch]", "Sentence-Transformers>=5"]}
    told += "".join(f"{name} = {lines}\n" for name, lines in extras.items())
    (root / "pyproject.toml").write_text(f"[project]\n{told}", encoding="utf-8")
    for file, text in (
        ("hf/right.py", "import numpy as np\nfrom torch import nn\nimport sentence_transformers"),
        (path, source),
    ):
        (root / "alibi_attn" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "alibi_attn" / file).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        (
            "hf/a.py",
            "def f():\n    import numpy, torch, polars",
            r"hf/a.py imports \['polars'\]: .* an extra of hf, embed",
        ),
        ("nn/a.py", "from sentence_transformers.models import Pooling", r"nn/a.py imports \['sentence_transformers'\]"),
        ("slopes.py", "import torch.nn", r"slopes.py imports \['torch'\]: it must be declared in the core of"),
        ("hf/right.py", "import numpy, torch", r"declares \['sentence_transformers'\], which nothing imports"),
    ],
)
def test_a_package_that_declares_too_little_or_too_much_is_caught(
    path: str, source: str, message: str, tmp_path: Path
) -> None:
    assert_what_is_imported_is_declared_and_no_more(made_up(tmp_path, path.replace("right", "b"), "import numpy"))
    with pytest.raises(AssertionError, match=message):
        assert_what_is_imported_is_declared_and_no_more(made_up(tmp_path, path, source))
