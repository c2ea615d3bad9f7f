"""The border between the library and the laboratory: the first stands alone, the second uses its public names only."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from import_graph import edges, import_statements, modules

ROOT = Path(__file__).parent.parent
# What the laboratory may import of the library: public names, `inspect`, and the modules of docs/api. Its commands also
# share the library's command line.
PUBLIC = ("alibi_attn", "alibi_attn.nn", "alibi_attn.hf", "alibi_attn.distributed", "alibi_attn.jax")
FOR_TOOLS = (
    *(f"alibi_attn.{name}" for name in ("inspect", "files", "strict_json", "units", "processor")),
    *(f"alibi_attn.nn.{name}" for name in ("linear.fastest", "linear.quantized", "allocator")),
    "alibi_attn.hf.readers.export",
    *(f"alibi_attn.hf.embedding.{name}" for name in ("sentence_encoder", "chunking", "late_chunking")),
)

# triton comes with torch's builds for GPUs; records become a frame where a user has pandas; the rest are measured peers.
UNDECLARED = {"triton", "pandas", "flash_attn", "llama_cpp", "cyllama", "ctranslate2", "gguf", "onnxruntime"}


def literal_names(path: Path) -> list[str]:
    """The list `__all__` of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __all__")


PUBLIC_NAMES = {
    package: [*literal_names(ROOT.joinpath(*package.split("."), "__init__.py")), "__version__"] for package in PUBLIC
}


def assert_the_library_stands_alone(root: Path) -> None:
    for module, imported in edges(root):
        if module.startswith("alibi_attn."):
            assert imported.split(".")[0] != "alibi_lab", f"{module} imports {imported}; the library stands without it"


def assert_the_laboratory_uses_public_names(root: Path) -> None:
    for module, source in modules(root):
        for node in import_statements(source) if module.startswith("alibi_lab.") else ():
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.Import):
                used = [name for name in names if name.split(".")[0] == "alibi_attn"]
                assert set(used) <= {*PUBLIC, *FOR_TOOLS}, f"{module} imports {used}, which are not for tools"
            elif node.module.split(".")[0] == "alibi_attn" and node.module not in FOR_TOOLS:
                if node.module.startswith("alibi_attn.cli") and module.startswith("alibi_lab.cli."):
                    continue
                offered = PUBLIC_NAMES.get(node.module, ())
                hidden = [x for x in names if x not in offered and f"{node.module}.{x}" not in (*PUBLIC, *FOR_TOOLS)]
                assert not hidden, f"{module} imports {hidden} of {node.module}, which are not public"


@pytest.mark.parametrize("rule", [assert_the_library_stands_alone, assert_the_laboratory_uses_public_names])
def test_the_packages_keep_their_border(rule):
    rule(ROOT)


def test_modules_for_tools_are_documented():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    assert not [name for name in FOR_TOOLS if name not in pages]


def test_every_import_is_declared():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*told["dependencies"], *(line for extra in told["optional-dependencies"].values() for line in extra)]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in lines}
    nodes = [node for _, source in modules(ROOT) for node in import_statements(source)]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"alibi_attn", "alibi_lab"}
    assert imported <= declared | UNDECLARED
    assert imported >= UNDECLARED, "a peer that nothing imports any more"


WRONG = [
    (
        assert_the_laboratory_uses_public_names,
        "../alibi_lab/lab/a.py",
        "from alibi_attn.attention.call import spec",
        "public",
    ),
    (
        assert_the_laboratory_uses_public_names,
        "../alibi_lab/report/a.py",
        "from alibi_attn.cli import console",
        "public",
    ),
    (assert_the_library_stands_alone, "hf/bloom.py", "def f():\n    import alibi_lab.measure.timing", "without it"),
    (assert_the_laboratory_uses_public_names, "../alibi_lab/lab/a.py", "from alibi_attn import attention", "public"),
    (assert_the_laboratory_uses_public_names, "../alibi_lab/cli/a.py", "import alibi_attn.nn.cache", "for tools"),
]


@pytest.mark.parametrize(("rule", "path", "source", "message"), WRONG)
def test_a_crossed_border_is_noticed(rule, path, source, message, tmp_path):
    for name in ("attention/call/spec.py", "nn/cache.py", "cli/console.py"):
        _write(tmp_path / "alibi_attn" / name, "")
    rule(tmp_path)
    _write(tmp_path / "alibi_attn" / path, source)
    with pytest.raises(AssertionError, match=message):
        rule(tmp_path)


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
