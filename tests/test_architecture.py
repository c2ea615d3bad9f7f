"""Architecture rules, checked with `ast`: allowed imports, the border, lengths of files, and public names.

Every rule is an `assert_*` function over a folder that holds the library, `alibi_attn/`, and the laboratory, `alibi_lab/`; a
test at the end breaks each rule in a made-up tree and expects to be caught.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from import_graph import edges, import_statements, modules, parts

import alibi_attn

ROOT = Path(__file__).parent.parent
MAX_LINES, MAX_COLUMNS = 400, 130
# More lines than that are a question, which these answer.
LONG_FILES = {
    "alibi_attn/attention/backends/native/backward.cpp": "one loop makes the gradients of keys, values, slopes and biases",
    "alibi_attn/attention/backends/native/block.hpp": "the scores of a block, with every kind of bias and mask",
}
PLAIN = {*sys.stdlib_module_names, "numpy"}

# Layers, lowest first. A module imports only from lower layers and its own folder; `jax` is next to layers 1 and 2.
LIBRARY = {
    **dict.fromkeys(("files", "processor", "strict_json"), -1),
    **dict.fromkeys(("slopes", "reach", "units", "lazy"), 0),
    "attention": 1,
    **dict.fromkeys(("nn", "flash_attn"), 2),
    "distributed": 2.5,
    "hf": 3,
    **dict.fromkeys(("cli", "inspect"), 4),
    "__main__": 5,
}
LABORATORY = {
    "provenance": 4.5,
    **dict.fromkeys(("records", "position_methods"), 5),
    **dict.fromkeys(("lab", "report"), 6),
    "measure": 7,
    "heads": 7,
    "recipes": 7.5,
    "cli": 8,
    "__main__": 9,
}
LAYERS = {"alibi_attn": LIBRARY, "alibi_lab": LABORATORY}
KERNELS = ["attention", "backends", "fused", "kernels"]
CONSTANTS = ["attention", "certificate", "constants"]
NATIVE = ["attention", "backends", "native"]
PLAIN_MODULES = (
    ["attention"],
    ["attention", "call"],
    ["attention", "call", "spec"],
    ["attention", "call", "checks"],
    ["attention", "call", "explanation"],
    ["attention", "call", "hints"],
    ["attention", "call", "options"],
    ["attention", "call", "query_positions"],
    ["attention", "call", "reads"],
    ["attention", "run"],
    ["attention", "run", "invariant"],
    ["attention", "run", "splitting"],
    ["attention", "certificate"],
    CONSTANTS,
    NATIVE,
    [*NATIVE, "build"],
    [*NATIVE, "compiling"],
    [*NATIVE, "visited"],
    [*NATIVE, "levels"],
    ["attention", "backends", "fused", "configs"],
)

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


def assert_layers(root: Path) -> None:
    for module, imported in edges(root):
        package, other = module.split(".")[0], imported.split(".")[0]
        here, there = parts(module), parts(imported)
        if other not in LAYERS or not here or (package, other) == ("alibi_lab", "alibi_attn"):
            continue  # assert_the_laboratory_uses_public_names
        if not there:
            assert here[0] == "cli", f"{module} imports the package's root; import names from where they are defined"
            continue
        if there == ["__version__"]:
            continue
        assert here[0] in LAYERS[package] or here[0] == "jax", f"{module} has no layer; add it to the plan"
        assert there[0] in LAYERS[other] or there[0] == "jax", (
            f"{module} imports {imported}: import it from where it is defined"
        )
        if package == other and here[0] == there[0] and len(here) + len(there) > 2:
            continue  # its own folder
        if here[0] == "jax":
            allowed = LAYERS[other].get(there[0]) == 0 or there in PLAIN_MODULES or there[:4] == KERNELS
        elif there[0] == "jax":
            allowed = LAYERS[package][here[0]] >= 3
        else:
            allowed = LAYERS[other][there[0]] < LAYERS[package][here[0]]
        assert allowed, f"{module} imports {imported}, which is not in a lower layer"


def assert_backends_are_apart(root: Path) -> None:
    """A backend is a module or folder in backends/; all may import the protocol that they follow."""
    for module, imported in edges(root):
        here, there = parts(module), parts(imported)
        if here[:2] == there[:2] == ["attention", "backends"] and len(here) > 2 and imported.startswith("alibi_attn."):
            separate = there[2:3] in (here[2:3], ["protocol"])
            assert separate, f"backend {module} imports backend {imported}"


def assert_kernels_are_triton_source(root: Path) -> None:
    for module, imported in edges(root):
        here, there = parts(module), parts(imported)
        if here[:4] == KERNELS:
            own = imported.startswith("alibi_attn.") and (there[:4] == KERNELS or there == CONSTANTS)
            plain = imported.split(".")[0] in ("triton", "typing")
            assert own or plain, f"{module} imports {imported}; kernels hold Triton only"
        elif there[:4] == KERNELS and imported.startswith("alibi_attn."):
            assert here[:3] == KERNELS[:3] or here[:2] == ["jax", "backends"], (
                f"{module} imports kernels; only their backend may, and JAX"
            )


def assert_frameworks_stay_outside(root: Path) -> None:
    """Layer 0 and below and PLAIN_MODULES are plain; report/ and jax/ load no torch; below 3 only jax/ loads jax."""
    for module, imported in edges(root):
        here, package = parts(module), imported.split(".")[0]
        layer = LAYERS[module.split(".")[0]].get(here[0], 2) if here else 5
        plain = layer <= 0 or here in PLAIN_MODULES
        if plain and package != "alibi_attn":
            assert package in PLAIN, f"{module} imports {imported}; it may use the standard library and numpy"
        if here[:1] in (["report"], ["jax"]):
            assert package != "torch", f"{module} imports torch"
        if here[:1] != ["jax"] and layer < 3:
            assert package not in ("jax", "flax"), f"{module} imports {imported}; JAX lives in alibi_attn/jax"


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


def assert_files_are_short(root: Path) -> None:
    for folder in ("alibi_attn", "alibi_lab", "tests", "examples"):
        for path in sorted((root / folder).rglob("*.[pch]*")):
            if path.suffix not in (".py", ".cpp", ".hpp"):
                continue
            lines, name = path.read_text(encoding="utf-8").splitlines(), path.relative_to(root).as_posix()
            if name in LONG_FILES:
                assert len(lines) > MAX_LINES, (
                    f"{name} has {len(lines)} lines; it needs no reason in LONG_FILES any more"
                )
            else:
                assert len(lines) <= MAX_LINES, (
                    f"{name} has {len(lines)} lines: split it, or give the reason in LONG_FILES"
                )
            widest = max(map(len, lines), default=0) if path.suffix != ".py" else 0  # ruff checks Python files
            assert widest <= MAX_COLUMNS, f"{name} has a line of {widest}; {MAX_COLUMNS} are allowed"


def literal_names(path: Path) -> list[str]:
    """The list `__all__` of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __all__")


PUBLIC_NAMES = {
    package: [*literal_names(ROOT.joinpath(*package.split("."), "__init__.py")), "__version__"] for package in PUBLIC
}


def assert_loads_no_framework(statement: str, *frameworks: str) -> None:
    loaded = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, cwd=ROOT)
    found = set(result.stdout.split()) & set(frameworks)
    assert not found, f"`{statement}` loads {', '.join(sorted(found))}"


def assert_public_names_are_documented(page: str, public: list[str]) -> None:
    """docs/api.md lists `__all__`, and documents import nothing else from the package's root."""
    listed = re.findall(r"^   (\w+)$", page.split(".. autosummary::", 1)[-1].split("```", 1)[0], flags=re.MULTILINE)
    assert sorted(listed) == sorted(public), f"docs/api.md lists {sorted(listed)} but __all__ is {sorted(public)}"


TREE_RULES = [
    assert_layers,
    assert_backends_are_apart,
    assert_kernels_are_triton_source,
    assert_frameworks_stay_outside,
    assert_the_library_stands_alone,
    assert_the_laboratory_uses_public_names,
    assert_files_are_short,
]


@pytest.mark.parametrize("rule", TREE_RULES)
def test_the_house_follows_its_plan(rule):
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


def test_importing_the_package_loads_no_framework():
    assert_loads_no_framework("import alibi_attn", "torch", "jax", "transformers", "matplotlib")
    assert_loads_no_framework("import alibi_attn; alibi_attn.alibi_slopes(8); dir(alibi_attn)", "torch", "jax")


def test_compiling_a_wheels_kernels_loads_no_package():
    """It must run with setuptools alone."""
    assert_loads_no_framework("import alibi_attn.attention.backends.native.build", "numpy", "torch", "jax")


def test_a_report_loads_no_framework():
    assert_loads_no_framework("import alibi_lab.report.published", "torch", "jax", "matplotlib", "jinja2")
    pages = "import alibi_lab.report.page, alibi_lab.report.plots.bias"
    assert_loads_no_framework(pages, "torch", "jax", "matplotlib.pyplot")


def test_public_names_are_what_the_documents_say():
    assert_public_names_are_documented((ROOT / "docs" / "api.md").read_text(encoding="utf-8"), alibi_attn.__all__)


@pytest.mark.parametrize("name", alibi_attn.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    assert getattr(alibi_attn, name).__doc__.strip()
    assert name in dir(alibi_attn)


WRONG = [
    (assert_layers, "nn/block.py", "from alibi_lab.lab.model.language_model import A", "not in a lower layer"),
    (assert_layers, "slopes.py", "from alibi_attn import strict_json, nn", "not in a lower layer"),
    (assert_layers, "jax/flax/layers.py", "import alibi_attn.attention.api", "not in a lower layer"),
    (assert_layers, "nn/block.py", "from alibi_attn import jax", "not in a lower layer"),
    (assert_layers, "nn/block.py", "from alibi_attn import alibi_attention", "import it from where it is defined"),
    (assert_layers, "nn/block.py", "from ..attention import api", "a relative import"),
    (assert_layers, "nn/block.py", "import alibi_attn", "imports the package's root"),
    (assert_layers, "drawer.py", "import alibi_attn.slopes", "has no layer"),
    (assert_backends_are_apart, "attention/backends/b.py", "import alibi_attn.attention.backends.a", "imports backend"),
    (assert_kernels_are_triton_source, "attention/backends/fused/kernels/forward.py", "import torch", "Triton only"),
    (
        assert_kernels_are_triton_source,
        "nn/a.py",
        f"import {'.'.join(['alibi_attn', *KERNELS])}.forward",
        "backend may",
    ),
    (assert_frameworks_stay_outside, "reach.py", "import torch", "standard library and numpy"),
    (assert_frameworks_stay_outside, "jax/attention.py", "import torch", "imports torch"),
    (assert_frameworks_stay_outside, "nn/a.py", "import jax.numpy as jnp", "JAX lives in"),
    (assert_files_are_short, "nn/a.py", "x = 1\n" * 401, "has 401 lines"),
    (assert_files_are_short, "nn/a.cpp", "//" + 200 * "x", "has a line of 202"),
    (
        assert_the_laboratory_uses_public_names,
        "alibi_lab/lab/a.py",
        "from alibi_attn.attention.call import spec",
        "public",
    ),
    (assert_the_laboratory_uses_public_names, "alibi_lab/report/a.py", "from alibi_attn.cli import console", "public"),
    (assert_the_library_stands_alone, "hf/bloom.py", "def f():\n    import alibi_lab.measure.timing", "without it"),
    (assert_the_laboratory_uses_public_names, "alibi_lab/lab/a.py", "from alibi_attn import attention", "public"),
    (assert_the_laboratory_uses_public_names, "alibi_lab/cli/a.py", "import alibi_attn.nn.cache", "for tools"),
]


@pytest.mark.parametrize(("rule", "path", "source", "message"), WRONG)
def test_every_rule_catches_a_tree_that_breaks_it(rule, path, source, message, tmp_path):
    for name in ("slopes.py", "strict_json.py", "nn/cache.py", "jax/__init__.py", "cli/console.py"):
        _write(tmp_path / "alibi_attn" / name, "import math")
    for name in ("records.py", "report/page.py", "lab/config.py", "lab/model/language_model.py", "recipes/index.py"):
        _write(tmp_path / "alibi_lab" / name, "import math")
    for name in ("api.py", "call/spec.py", "backends/a.py", "backends/b/d.py", "backends/fused/kernels/forward.py"):
        _write(tmp_path / "alibi_attn" / "attention" / name, "")
    rule(tmp_path)
    _write(tmp_path / (path if path.startswith("alibi_lab") else f"alibi_attn/{path}"), source)
    with pytest.raises(AssertionError, match=message):
        rule(tmp_path)


def test_a_framework_or_an_undocumented_name_is_noticed():
    with pytest.raises(AssertionError, match="loads decimal"):
        assert_loads_no_framework("import decimal", "decimal", "torch")
    page = "# API\n\n.. autosummary::\n\n   a\n   b\n   c\n```\n\n   d\n"
    assert_public_names_are_documented(page, ["c", "a", "b"])
    with pytest.raises(AssertionError, match=r"docs/api\.md lists"):
        assert_public_names_are_documented(page, ["a", "b"])


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
