"""Checks of a position method: its attributes and signatures when it is made, and what its hooks return in every call.

An error names the hook's file and line, because the method may be a user's. Shapes, dtypes and types are always checked; values
only while a method is tried (`method_trial.py`), because reading them synchronizes a GPU. Shapes as in `attention/spec.py`.
"""

import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from alibi_lab.lab.config import Stretch
from alibi_lab.lab.model.position_method import (
    Attention,
    Bias,
    ByDistance,
    ContentBias,
    ForgetGates,
    Pass,
    PositionError,
    PositionMethod,
    Windowed,
)
from alibi_lab.position_methods import Look
from alibi_lab.records import Json

_ARGUMENTS = {
    "add": "x, positions",
    "rotate": "q, k, positions, at",
    "bias": "at",
    "attend": "q, k, v, at, default",
    "stretched": "stretch, length",
    "curves": "model, corpus, config",
}
_BIASES = (
    "slopes [H], ByDistance, ContentBias, ForgetGates, Windowed, a bias [H, T, S] with −inf for hidden keys, or None"
)


def check_signatures(kind: type[PositionMethod]) -> None:
    """Checks the arguments of the class and of its hooks.

    Raises:
        PositionError: some are invalid; names the file and line.
    """
    _check_signature(kind, "__init__", kind, "config, trained_length")
    for hook, arguments in _ARGUMENTS.items():
        if hasattr(kind, hook):
            _check_signature(kind, hook, getattr(kind, hook), arguments if hook == "curves" else f"self, {arguments}")


def checked(method: PositionMethod) -> PositionMethod:
    """The method, if its attributes and parameters are valid.

    Raises:
        PositionError: some are not; names the file and line of its class.
    """
    kind = type(method)
    if "_parameters" not in vars(method) or not hasattr(method, "trained_length"):
        _fail(kind, "__init__", "does not call super().__init__(config, trained_length); call it first")
    _check_attributes(kind, method)
    for name, parameter in method.named_parameters():
        if not parameter.is_floating_point() or (parameter.ndim > 1 and not parameter.numel()):
            _fail(
                kind,
                "",
                f"has a parameter {name} of shape {list(parameter.shape)} and {parameter.dtype}; parameters are floating and "
                "not empty; use nn.Buffer for other tensors",
            )
    return method


def added(method: PositionMethod, x: Tensor, positions: Tensor, *, values: bool) -> Tensor:
    """The result of `add`, checked. In all functions here, `values` checks values too."""
    result: object = method.add(x, positions)
    return _tensor(method, "add", result, x.shape, like=x, values=values)


def rotated(
    method: PositionMethod, q: Tensor, k: Tensor, positions: Tensor, at: Pass, *, values: bool
) -> tuple[Tensor, Tensor]:
    """The result of `rotate`, checked."""
    result: object = method.rotate(q, k, positions, at)
    if not isinstance(result, tuple) or len(result) != 2:
        _returned(method, "rotate", result, "the two tensors (q, k)")
    first, second = (
        _tensor(method, "rotate", one, like.shape, like=like, values=values)
        for one, like in zip(result, (q, k), strict=True)
    )
    return first, second


def bias_of(method: PositionMethod, at: Pass, x: Tensor, *, values: bool) -> Bias:
    """The result of `bias`, checked; `x` [B, T, E] is any tensor of this pass."""
    result: object = method.bias(at)
    heads = method.config.num_heads
    shapes = [(heads,), (heads, at.query_len, at.key_len)]
    if result is None:
        return None
    if isinstance(result, Windowed):
        if type(result.window) is not int or result.window < 1:
            _fail(method, "bias", f"returned {result}; a window is a whole number of tokens, 1 or more")
        return result
    if isinstance(result, ByDistance):
        _numbers(method, "the table of ByDistance", result.table, [(heads, at.key_len)], x, values=values)
        return result
    if isinstance(result, ContentBias | ForgetGates):
        name = "key_bias" if isinstance(result, ContentBias) else "log_fgate"
        _numbers(method, name, getattr(result, name), [(x.shape[0], heads, x.shape[1])], x, values=values)
        if result.slopes is not None:
            _numbers(method, f"the slopes of {type(result).__name__}", result.slopes, shapes[:1], x, values=values)
        return result
    if not isinstance(result, Tensor):
        _returned(method, "bias", result, _BIASES)
    return _numbers(method, "a tensor", result, shapes, x, values=values)


def attended(
    method: PositionMethod, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention, *, values: bool
) -> Tensor:
    """The result of `attend`, checked."""
    result: object = method.attend(q, k, v, at, default)
    return _tensor(method, "attend", result, (*q.shape[:3], v.shape[3]), like=v, values=values)


def stretched(method: PositionMethod, stretch: Stretch, length: int) -> PositionMethod:
    """The result of `stretched`, checked."""
    result: object = method.stretched(stretch, length)
    if not isinstance(result, PositionMethod):
        _returned(method, "stretched", result, "a position method")
    return result


def checked_curves(kind: type[PositionMethod], result: object) -> Mapping[str, Mapping[str, Sequence[Json]]]:
    """The result of `curves`, checked."""
    if not isinstance(result, Mapping) or not all(map(_is_curve, result, result.values())):
        _fail(
            kind,
            "curves",
            f"returned {str(result)[:200]}; it must return curves by name, {{name: {{column: list}}}}, with lists of equal "
            "length that hold numbers, text or None; pass tensor.tolist()",
        )
    return result


def located(method: type | PositionMethod, hook: str = "") -> str:
    """Where a hook is written, "mine.py, line 16"; its class, if the hook is inherited from this package."""
    kind = method if isinstance(method, type) else type(method)
    found = inspect.unwrap(getattr(kind, hook)) if hook else None
    code = getattr(found, "__code__", None)
    if code is not None and (not _is_built_in(found.__module__) or _is_built_in(kind.__module__)):
        return at_line(code.co_filename, code.co_firstlineno)
    try:
        return at_line(inspect.getfile(kind), inspect.getsourcelines(kind)[1])
    except (OSError, TypeError):  # a class that no file defines
        return kind.__module__


def at_line(path: str, line: int) -> str:
    """File and line, relative to the working directory if the file is below it.

    >>> at_line("mine.py", 3)
    'mine.py, line 3'
    """
    here = Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{here}, line {line}"


def _is_built_in(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _is_curve(name: object, columns: object) -> bool:
    if not isinstance(name, str) or not isinstance(columns, Mapping):
        return False
    lists = [column for column in columns.values() if isinstance(column, list | tuple)]
    plain = all(value is None or isinstance(value, int | float | str) for column in lists for value in column)
    return plain and len(lists) == len(columns) and len({len(column) for column in lists}) <= 1


def _tensor(
    method: PositionMethod, hook: str, result: object, shape: tuple[int, ...], *, like: Tensor, values: bool
) -> Tensor:
    # Under autocast the next linear layer casts; otherwise it needs the dtype of its weights.
    autocast = torch.is_autocast_enabled(like.device.type)
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if autocast else (like.dtype,)
    wanted = f"a tensor of shape {list(shape)} and {like.dtype} on {like.device}"
    if not isinstance(result, Tensor):
        _returned(method, hook, result, wanted)
    if result.shape != shape or result.dtype not in dtypes or result.device != like.device:
        _returned(method, hook, result, wanted)
    if values and not result.isfinite().all():
        _fail(method, hook, "returned NaN or infinite numbers for finite inputs")
    return result


def _numbers(
    method: PositionMethod, name: str, tensor: object, shapes: list[tuple[int, ...]], x: Tensor, *, values: bool
) -> Tensor:
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(tensor, Tensor):
        _fail(method, "bias", f"returned {name} of type {type(tensor).__name__}; it must be a tensor {wanted}")
    if tensor.shape not in shapes or not tensor.is_floating_point() or tensor.device != x.device:
        _fail(
            method,
            "bias",
            f"returned {name} of shape {list(tensor.shape)} and {tensor.dtype} on {tensor.device}; it must be floating, "
            f"{wanted}, on {x.device}; use expand for a size that is 1",
        )
    if values and (tensor.isnan().any() or (tensor == math.inf).any()):
        _fail(method, "bias", f"returned {name} with NaN or +inf; −inf hides a key")
    return tensor


def _returned(method: PositionMethod, hook: str, result: object, wanted: str) -> NoReturn:
    if isinstance(result, Tensor):
        what = f"a tensor of shape {list(result.shape)} and {result.dtype} on {result.device}"
    else:
        what = "None" if result is None else f"a {type(result).__name__}"
    _fail(method, hook, f"returned {what}; it must return {wanted}")


def _fail(method: type | PositionMethod, hook: str, message: str) -> NoReturn:
    kind = method if isinstance(method, type) else type(method)
    raise PositionError(f"{located(kind, hook)}: {kind.__name__}{'.' if hook else ''}{hook} {message}")


def _check_signature(kind: type[PositionMethod], hook: str, function: object, arguments: str) -> None:
    if not callable(function):
        _fail(kind, "", f"has {hook} = {function!r}; it must be a method with the arguments ({arguments})")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        advice = "; make it a class method" if hook == "curves" else ""
        _fail(kind, hook, f"must accept the arguments ({arguments}): {error}{advice}")


def _check_attributes(kind: type[PositionMethod], method: PositionMethod) -> None:
    def check(name: str, valid: bool, wanted: str) -> None:
        if not valid:
            _fail(kind, "", f"has {name} = {getattr(method, name)!r}; it must be {wanted}")

    check("relative", type(method.relative) is bool, "True or False")
    check("per_layer", type(method.per_layer) is bool, "True or False")
    for name in ("max_positions", "segment"):
        value = getattr(method, name)
        check(name, value is None or (type(value) is int and value > 0), "None or a whole number of tokens above 0")
    check("memory", type(method.memory) is int and method.memory >= 0, "a whole number of tokens, 0 or more")
    check("look", method.look is None or isinstance(method.look, Look), "None or a Look")
    known = [name for name in typing.get_args(Stretch) if name != "none"]
    known_only = isinstance(method.stretches, tuple) and all(one in known for one in method.stretches)
    check("stretches", known_only, f"a tuple of some of {', '.join(known)}")
