"""Architecture rules, checked with `ast`: allowed imports, the border, lengths of files, and public names.

Every rule is an `assert_*` function over a folder that holds the library, `alibi_attn/`, and the laboratory, `alibi_lab/`; a
test at the end breaks each rule in a made-up tree and expects to be caught.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from import_graph import edges, import_statements, modules, parts
from programs import printed

import alibi_attn

ROOT = Path(__file__).parent.parent
MAX_LINES, MAX_COLUMNS = 400, 130
# More lines than that are a question, which these answer.
LONG_FILES = {
    "alibi_attn/attention/backends/native/backward.cpp": "one loop makes the gradients of keys, values, slopes and biases",
    "alibi_attn/attention/backends/native/block.hpp": "the scores of a block, with every kind of bias and mask",
}
PLAIN = {*sys.stdlib_module_names, "numpy"}

# By folder: its modules and folders, lowest first. A part imports only from rows before its own; `jax` has its own rule.
ORDERS = {
    "alibi_attn": (
        ("files", "processor", "strict_json"),
        ("slopes", "reach", "units", "lazy"),
        ("attention",),
        ("nn", "flash_attn", "jax"),
        ("distributed",),
        ("hf",),
        ("cli", "inspect"),
        ("__main__",),
    ),
    "alibi_lab": (
        ("provenance",),
        ("records", "position_methods"),
        ("lab", "report"),
        ("measure", "heads"),
        ("recipes",),
        ("cli",),
        ("__main__",),
    ),
    "alibi_attn.attention": (
        ("call",),
        ("certificate",),
        ("operators",),
        ("backends",),
        ("run",),
        ("api", "forgetting", "toeplitz", "varlen"),
        ("kept", "rows"),
    ),
    "alibi_attn.jax": (
        ("call",),
        ("backends",),
        ("attention",),
        ("explanation", "forgetting", "multihead"),
        ("flax",),
    ),
    "alibi_attn.hf": (("caches",), ("attention",), ("readers",), ("patching",), ("embedding",)),
    "alibi_lab.lab": (
        ("clock", "config", "sealed_folder"),
        ("config_io", "data", "model", "scales"),
        ("evaluation", "planning"),
        ("systems", "training"),
        ("run",),
        ("ray_trainings",),
        ("experiment",),
    ),
    "alibi_lab.report": (
        ("published", "series"),
        ("answers", "intervals"),
        ("verdicts",),
        ("rollouts",),
        ("tables",),
        ("exports", "plots"),
        ("section",),
        ("sections",),
        ("page",),
    ),
}
KERNELS = ["attention", "backends", "fused", "kernels"]
CONSTANTS = ["attention", "certificate", "constants"]
# Modules that load the standard library and numpy only, by folder; the folders do too.
PLAIN_MODULES = {
    "attention": "",
    "attention.call": "spec checks explanation hints options query_positions reads",
    "attention.run": "invariant splitting",
    "attention.certificate": "constants",
    "attention.backends.native": "build compiling visited levels",
    "attention.backends.fused": "configs",
}

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


def is_plain(path: list[str]) -> bool:
    folder = ".".join(path[:-1])
    return ".".join(path) in PLAIN_MODULES or (bool(path) and path[-1] in PLAIN_MODULES.get(folder, "").split())


def assert_order(root: Path) -> None:
    for folder, rows in ORDERS.items():
        place = {name: row for row, names in enumerate(rows) for name in names}
        for module, imported in edges(root):
            if not (module.startswith(f"{folder}.") and f"{imported}.".startswith(f"{folder}.")):
                continue
            here, there = (name.removeprefix(folder).lstrip(".").split(".")[0] for name in (module, imported))
            if here == "__init__" or there == "__version__" or (here, there) == ("cli", ""):
                continue  # it names what it loads lazily
            assert there, f"{module} imports the folder {folder}; import names from where they are defined"
            for name in (here, there):
                assert name in place, f"{module} imports {imported}, but {name} has no place in the order of {folder}"
            if here == there and module != f"{folder}.{here}":
                continue  # its own folder
            allowed = place[there] < place[here]
            if here == "jax":
                path = parts(imported)
                allowed = there in rows[1] or is_plain(path) or path[:4] == KERNELS
            elif there == "jax":
                allowed = place[here] >= place["hf"]
            assert allowed, f"{module} imports {imported}, which does not come before it"


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
    """The first two rows and PLAIN_MODULES are plain; report/ and jax/ load no torch; below hf only jax/ loads jax."""
    rows = ORDERS["alibi_attn"]
    plain, below_hf = ({name for row in some for name in row} for some in (rows[:2], rows[: rows.index(("hf",))]))
    for module, imported in edges(root):
        here, package = parts(module), imported.split(".")[0]
        own = {*here[:1]} if module.startswith("alibi_attn.") else set()
        if (own & plain or is_plain(here)) and package != "alibi_attn":
            assert package in PLAIN, f"{module} imports {imported}; it may use the standard library and numpy"
        if here[:1] in (["report"], ["jax"]):
            assert package != "torch", f"{module} imports torch"
        if own & below_hf - {"jax"}:
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
            assert (len(lines) > MAX_LINES) == (name in LONG_FILES), (
                f"{name} has {len(lines)} lines: LONG_FILES has a reason for each file of more than {MAX_LINES}, and for no other"
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
    found = set(printed("-c", loaded, cwd=ROOT).split()) & set(frameworks)
    assert not found, f"`{statement}` loads {', '.join(sorted(found))}"


def assert_public_names_are_documented(page: str, public: list[str]) -> None:
    """docs/api.md lists `__all__`, and documents import nothing else from the package's root."""
    listed = re.findall(r"^   (\w+)$", page.split(".. autosummary::", 1)[-1].split("```", 1)[0], flags=re.MULTILINE)
    assert sorted(listed) == sorted(public), f"docs/api.md lists {sorted(listed)} but __all__ is {sorted(public)}"


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


WRONG = {
    assert_order: [
        ("slopes.py", "from alibi_attn import strict_json, nn", "does not come before it"),
        ("jax/flax/layers.py", "import alibi_attn.attention.api", "does not come before it"),
        ("nn/block.py", "from alibi_attn import jax", "does not come before it"),
        ("nn/block.py", "from alibi_attn import alibi_attention", "alibi_attention has no place in the order"),
        ("nn/block.py", "from ..attention import api", "a relative import"),
        ("nn/block.py", "import alibi_attn", "imports the folder alibi_attn"),
        ("drawer.py", "import alibi_attn.slopes", "drawer has no place in the order"),
        ("alibi_lab/lab/config.py", "import alibi_lab.lab.data.corpus", "does not come before it"),
        ("alibi_lab/lab/config.py", "import alibi_lab.lab", "imports the folder alibi_lab.lab"),
        ("alibi_lab/lab/new.py", "import alibi_lab.lab.config", "new has no place in the order"),
    ],
    assert_backends_are_apart: [
        ("attention/backends/b.py", "import alibi_attn.attention.backends.a", "imports backend"),
    ],
    assert_kernels_are_triton_source: [
        ("attention/backends/fused/kernels/forward.py", "import torch", "Triton only"),
        ("nn/a.py", f"import {'.'.join(['alibi_attn', *KERNELS])}.forward", "backend may"),
    ],
    assert_frameworks_stay_outside: [
        ("reach.py", "import torch", "standard library and numpy"),
        ("jax/attention.py", "import torch", "imports torch"),
        ("nn/a.py", "import jax.numpy as jnp", "JAX lives in"),
    ],
    assert_files_are_short: [
        ("nn/a.py", "x = 1\n" * 401, "has 401 lines"),
        ("nn/a.cpp", "//" + 200 * "x", "has a line of 202"),
    ],
    assert_the_library_stands_alone: [
        ("hf/bloom.py", "def f():\n    import alibi_lab.measure.timing", "without it"),
    ],
    assert_the_laboratory_uses_public_names: [
        ("alibi_lab/lab/a.py", "from alibi_attn.attention.call import spec", "public"),
        ("alibi_lab/report/a.py", "from alibi_attn.cli import console", "public"),
        ("alibi_lab/lab/a.py", "from alibi_attn import attention", "public"),
        ("alibi_lab/cli/a.py", "import alibi_attn.nn.cache", "for tools"),
    ],
}


@pytest.mark.parametrize("rule", WRONG)
def test_the_house_follows_its_plan(rule):
    rule(ROOT)


@pytest.mark.parametrize(
    ("rule", "path", "source", "message"), [(rule, *row) for rule, rows in WRONG.items() for row in rows]
)
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
