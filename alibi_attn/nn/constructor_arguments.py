"""Unknown arguments of the layers' constructors are reported before missing ones, with our name for them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from alibi_attn.attention.call.hints import unknown_argument

_Function = TypeVar("_Function", bound=Callable[..., Any])


def checks_names(*passed_on_to: type) -> Callable[[_Function], _Function]:
    """Makes an `__init__` raise a TypeError for a name that it does not have, and for too many arguments by position.

    Args:
        passed_on_to: classes whose arguments it accepts as well.
    """

    def decorate(init: _Function) -> _Function:
        functions: tuple[Callable[..., Any], ...] = (init, *passed_on_to)
        parameters = [parameter for one in functions for parameter in inspect.signature(one).parameters.values()]
        known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        owner = init.__qualname__.rpartition(".")[0]
        own = inspect.signature(init).parameters.values()
        by_position = [parameter.name for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

        @functools.wraps(init)
        def checked(*args: Any, **options: Any) -> None:
            if unknown := [name for name in options if name not in known]:
                raise unknown_argument(owner, unknown)
            if more := args[len(by_position) :]:
                raise TypeError(
                    f"{owner}() takes {', '.join(by_position[1:])} by position but got {more[0]!r} after them; pass options by "
                    "name, without max_seq_len: there is no maximum length"
                )
            init(*args, **options)

        return checked  # type: ignore[return-value]

    return decorate
