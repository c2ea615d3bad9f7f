"""Position methods from outside of the package, named `package.module:Class` or `path/file.py:Class`.

Checkpoints and records keep this path and a hash of what the file does. Importing runs the code, so only paths that the user
names are imported: a checkpoint that names one is loaded only if the caller names it too (`training/checkpoint.py`).
"""

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from alibi_lab.lab.config import IMPORT_PATH, METHOD_MODULE, ConfigError
from alibi_lab.lab.model.position_method import PositionMethod
from alibi_lab.position_methods import Look
from alibi_lab.records import Json


def imported_method(path: str) -> type[PositionMethod]:
    """The class that the path names.

    Raises:
        ConfigError: there is no such file, module or class, or it is not a `PositionMethod`.
    """
    (place, _, name), module = path.rpartition(":"), _module(path)
    method = getattr(module, name, None)
    if not (isinstance(method, type) and issubclass(method, PositionMethod)):
        known = [key for key, kind in vars(module).items() if getattr(kind, "__module__", "") == module.__name__]
        raise ConfigError(
            f"model.method is {path!r} but {place} has no subclass of PositionMethod named {name}; it defines "
            f"{', '.join(known) or 'nothing'}"
        )
    return method


def source_facts(method: str) -> dict[str, Json]:
    """For a method from outside: its path, a hash of what its file does, its label, colors and marker. Built-in ones: nothing."""
    if not IMPORT_PATH.fullmatch(method):
        return {}
    look = imported_method(method).look or Look(method.rpartition(":")[2], "#111827", "#f3f4f6", "*")
    # The hash is of the syntax tree without imports, comments, layout and the module's docstring.
    tree = ast.parse(Path(str(_module(method).__file__)).read_bytes())
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    digest = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
    return {"path": method, "sha256": digest, **dataclasses.asdict(look)}


def _module(path: str) -> ModuleType:
    place = path.rpartition(":")[0]
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"model.method is {path!r} but there is no module {error.name}; install it, or pass FILE.py:Class"
            ) from None
    try:
        content = Path(place).read_bytes()
    except OSError as error:
        raise ConfigError(f"model.method is {path!r} but {place} cannot be read ({error.strerror})") from None
    # The name depends on the content, so that a changed file is imported again.
    name = METHOD_MODULE + hashlib.sha256(str(Path(place).resolve()).encode() + content).hexdigest()[:16]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
