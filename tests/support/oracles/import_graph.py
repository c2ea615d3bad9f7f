"""Which module imports what, read with `ast` from a folder that holds the two packages."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("alibi_attn", "alibi_lab")


def modules(root: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, source) of every module of the packages; a folder goes by the name of its __init__."""
    for path in sorted(root.glob("alibi_*/**/*.py")):
        yield ".".join(path.relative_to(root).with_suffix("").parts), path.read_text(encoding="utf-8")


@functools.cache
def import_statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    """All imports in a module; computed once for all rules, since parsing dominates their time."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(root: Path, source: str) -> Iterator[str]:
    """A module's imports, as dotted names; `from a import b` is a.b if that is a module."""
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            for alias in node.names:
                inner = root.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module or node.module in PACKAGES else node.module


def parts(dotted: str) -> list[str]:
    """alibi_attn.nn.cache -> [nn, cache]."""
    return [part for part in dotted.split(".")[1:] if part != "__init__"]


def edges(root: Path) -> Iterator[tuple[str, str]]:
    """Every import of the packages: (the module, what it imports). The root only names what it loads lazily."""
    for module, source in modules(root):
        if module != "alibi_attn.__init__":
            yield from ((module, imported) for imported in imports(root, source))
