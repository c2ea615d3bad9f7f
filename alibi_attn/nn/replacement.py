"""Attributes of modules that we replace and restore, also after other tools have wrapped the same modules.

accelerate stores the forward that it wraps in `_old_forward` and calls it from its own `forward`; such a forward is restored
below the wrapper. Any other wrapper hides ours, and restoring would remove it: that raises an error, and nothing changes.
"""

import dataclasses
import types
from collections.abc import Sequence

from torch import nn

_FORWARDS = ("forward", "_old_forward")


@dataclasses.dataclass(frozen=True, eq=False)
class Replacement:
    """One replaced attribute of a module.

    Args:
        label: the module's name, for errors.
        name: of the attribute.
        ours: the value that replaced it.
        had: whether the instance had such an attribute; else it was the class's.
        before: its value.
    """

    module: nn.Module
    label: str
    name: str
    ours: object
    had: bool
    before: object


def is_hooked(module: nn.Module) -> bool:
    """Whether accelerate (device_map=...) wraps the module's forward."""
    return "_hf_hook" in vars(module) and "_old_forward" in vars(module)


def forward_of(module: nn.Module) -> str:
    """The attribute that holds the forward below accelerate's wrapper, if there is one."""
    return "_old_forward" if is_hooked(module) else "forward"


def replaced(module: nn.Module, label: str, name: str, value: object) -> Replacement:
    """Sets an attribute of the instance; `restore` reverts it."""
    own = vars(module)
    change = Replacement(module, label or "the model", name, value, name in own, own.get(name))
    setattr(module, name, value)
    return change


def restore(changes: Sequence[Replacement], what: str) -> None:
    """Restores all attributes, or none.

    Args:
        what: what is undone, for the error.

    Raises:
        ValueError: one of them was replaced since.
    """
    places = [_place(change) for change in changes]
    for change, place in zip(changes, places, strict=True):
        if place is None:
            raise ValueError(
                f"{change.label} ({type(change.module).__name__}) has another {change.name} than {what} gave it: it was wrapped "
                "or replaced since; remove that first, then call undo() again (nothing has changed)"
            )
    for change, place in reversed(list(zip(changes, places, strict=True))):
        assert place is not None
        value, is_of_class = change.before, not change.had
        if change.name in _FORWARDS:
            own = types.MethodType(type(change.module).forward, change.module)
            value = change.before if change.had else own
            is_of_class = place == "forward" and value == own
        if is_of_class:
            delattr(change.module, place)
        else:
            setattr(change.module, place, value)


def _place(change: Replacement) -> str | None:
    """The attribute that holds our value now; None if another tool has replaced it."""
    own = vars(change.module)
    names = _FORWARDS if change.name in _FORWARDS else (change.name,)
    return next((name for name in names if own.get(name) is change.ours), None)
