"""Position methods from outside of the package, and the checks of every method.

A method from outside is named `package.module:Class` or `path/file.py:Class`. Checkpoints and records keep this path and a hash
of what the file does. Importing runs the code, so only paths that the user names are imported: a checkpoint that names one is
loaded only if the caller names it too (`training/checkpoint.py`).

Attributes and signatures are checked when a method is made, and what its hooks return in every call. An error names the hook's
file and line, because the method may be a user's. Shapes, dtypes and types are always checked; values only while a method is
tried (`method_trial.py`), because reading them synchronizes a GPU. Shapes as in `attention/call/spec.py`.
"""

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from alibi_lab.lab.config import IMPORT_PATH, METHOD_MODULE, ConfigError, ModelConfig, Stretch, check_fields
from alibi_lab.lab.model import position_method as results
from alibi_lab.lab.model.position_method import Attention, Bias, Pass, PositionError, PositionMethod
from alibi_lab.position_methods import Look
from alibi_lab.records import Curves, Json


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


def made(kind: type[PositionMethod], config: ModelConfig, trained_length: int) -> PositionMethod:
    """A method of this class, if the arguments of the class and of its hooks, its attributes and its parameters are valid.

    Raises:
        PositionError: some are not; names the file and line.
    """
    ours = {hook: getattr(PositionMethod, hook) for hook in ("add", "rotate", "bias", "attend", "stretched")}
    calls = {hook: ", ".join(inspect.signature(known).parameters) for hook, known in ours.items()}
    calls = {"__init__": "config, trained_length", **calls}
    if hasattr(kind, "curves"):
        calls["curves"] = "model, corpus, config"
    for hook, arguments in calls.items():
        function = kind if hook == "__init__" else getattr(kind, hook)
        if not callable(function):
            _fail(kind, "", f"has {hook} = {function!r}; it must be a method with the arguments ({arguments})")
        try:
            inspect.signature(function).bind(*arguments.split(", "))
        except TypeError as error:
            advice = "; make it a class method" if hook == "curves" else ""
            _fail(kind, hook, f"must accept the arguments ({arguments}): {error}{advice}")
    method = kind(config, trained_length)
    if "_parameters" not in vars(method) or not hasattr(method, "trained_length"):
        _fail(kind, "__init__", "does not call super().__init__(config, trained_length); call it first")
    try:
        check_fields(kind.__name__, method, may_be_0=("memory",), kinds=inspect.get_annotations(PositionMethod))
    except ConfigError as error:
        raise PositionError(f"{located(kind)}: {error}") from None
    for name, parameter in method.named_parameters():
        if not parameter.is_floating_point() or (parameter.ndim > 1 and not parameter.numel()):
            found = f"{name} of shape {list(parameter.shape)} and {parameter.dtype}"
            advice = "parameters are floating and not empty; use nn.Buffer for other tensors"
            _fail(kind, "", f"has a parameter {found}; {advice}")
    return method


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The hooks of a method; what they return is checked.

    Args:
        values: values are checked too.
    """

    method: PositionMethod
    values: bool

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._tensor("add", self.method.add(x, positions), x)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        result: object = self.method.rotate(q, k, positions, at)
        if not isinstance(result, tuple) or len(result) != 2:
            self._returned("rotate", result, "the two tensors (q, k)")
        return self._tensor("rotate", result[0], q), self._tensor("rotate", result[1], k)

    def bias(self, at: Pass, x: Tensor) -> Bias:
        """The result of `bias`; `x` [B, T, E] is any tensor of this pass."""
        result: object = self.method.bias(at)
        heads = self.method.config.num_heads
        if isinstance(result, results.Windowed):
            if type(result.window) is not int or result.window < 1:
                self._fail("bias", f"returned {result}; a window is a whole number of tokens, 1 or more")
        elif isinstance(result, results.ByDistance):
            self._numbers("the table of ByDistance", result.table, x, (heads, at.key_len))
        elif isinstance(result, results.ContentBias | results.ForgetGates):
            name = "key_bias" if isinstance(result, results.ContentBias) else "log_fgate"
            self._numbers(name, getattr(result, name), x, (x.shape[0], heads, x.shape[1]))
            if result.slopes is not None:
                self._numbers(f"the slopes of {type(result).__name__}", result.slopes, x, (heads,))
        elif isinstance(result, Tensor):
            self._numbers("a tensor", result, x, (heads,), (heads, at.query_len, at.key_len))
        elif result is not None:
            wanted = "slopes [H], ByDistance, ContentBias, ForgetGates, Windowed, a bias [H, T, S]"
            self._returned("bias", result, f"{wanted} with −inf for hidden keys, or None")
        return result

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        return self._tensor("attend", self.method.attend(q, k, v, at, default), q)

    def stretched(self, stretch: Stretch, length: int) -> PositionMethod:
        result: object = self.method.stretched(stretch, length)
        if not isinstance(result, PositionMethod):
            self._returned("stretched", result, "a position method")
        return result

    def _tensor(self, hook: str, result: object, like: Tensor) -> Tensor:
        # Under autocast the next linear layer casts; otherwise it needs the dtype of its weights.
        autocast = torch.is_autocast_enabled(like.device.type)
        dtypes = (torch.float32, torch.bfloat16, torch.float16) if autocast else (like.dtype,)
        same_place = isinstance(result, Tensor) and result.shape == like.shape and result.device == like.device
        if not isinstance(result, Tensor) or not same_place or result.dtype not in dtypes:
            self._returned(hook, result, _described(like))
        if self.values and not result.isfinite().all():
            self._fail(hook, "returned NaN or infinite numbers for finite inputs")
        return result

    def _numbers(self, name: str, tensor: object, x: Tensor, *shapes: tuple[int, ...]) -> None:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        if not isinstance(tensor, Tensor):
            self._fail("bias", f"returned {name} of type {type(tensor).__name__}; it must be a tensor {wanted}")
        if tensor.shape not in shapes or not tensor.is_floating_point() or tensor.device != x.device:
            found = f"{name} of shape {list(tensor.shape)} and {tensor.dtype} on {tensor.device}"
            advice = "use expand for a size that is 1"
            self._fail("bias", f"returned {found}; it must be floating, {wanted}, on {x.device}; {advice}")
        if self.values and (tensor.isnan().any() or (tensor == math.inf).any()):
            self._fail("bias", f"returned {name} with NaN or +inf; −inf hides a key")

    def _returned(self, hook: str, result: object, wanted: str) -> NoReturn:
        self._fail(hook, f"returned {_described(result)}; it must return {wanted}")

    def _fail(self, hook: str, message: str) -> NoReturn:
        _fail(type(self.method), hook, message)


def checked_curves(kind: type[PositionMethod], result: object) -> Curves:
    """The result of `curves`, checked."""
    if not isinstance(result, Mapping) or not all(map(_is_curve, result, result.values())):
        wanted = (
            "{name: {column: list}}, with lists of equal length that hold numbers, text or None; pass tensor.tolist()"
        )
        _fail(kind, "curves", f"returned {str(result)[:200]}; it must return curves by name, {wanted}")
    return result


def located(kind: type, hook: str = "") -> str:
    """Where a hook is written, "mine.py, line 16"; its class, if the hook is inherited from this package.

    A path is relative to the working directory if the file is below it.
    """
    found = inspect.unwrap(getattr(kind, hook)) if hook else None
    code = getattr(found, "__code__", None)
    if code is not None and (not is_built_in(found) or is_built_in(kind)):
        path, line = code.co_filename, code.co_firstlineno
    else:
        try:
            path, line = inspect.getfile(kind), inspect.getsourcelines(kind)[1]
        except (OSError, TypeError):  # a class that no file defines
            return kind.__module__
    here = Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{here}, line {line}"


def is_built_in(written: object) -> bool:
    """Whether this package defines a class or function."""
    return str(written.__module__).partition(".")[0] == __name__.partition(".")[0]


def _is_curve(name: object, columns: object) -> bool:
    if not isinstance(name, str) or not isinstance(columns, Mapping):
        return False
    lists = [column for column in columns.values() if isinstance(column, list | tuple)]
    plain = all(value is None or isinstance(value, int | float | str) for column in lists for value in column)
    return plain and len(lists) == len(columns) and len({len(column) for column in lists}) <= 1


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)} and {result.dtype} on {result.device}"
    return "None" if result is None else f"a {type(result).__name__}"


def _fail(kind: type, hook: str, message: str) -> NoReturn:
    raise PositionError(f"{located(kind, hook)}: {kind.__name__}{'.' if hook else ''}{hook} {message}")


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
