"""Public names of a package that are loaded when they are first used, so that importing the package loads no framework."""

import importlib
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str], needs: tuple[str, str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        homes: the module of every name.
        needs: a module that the names may need, its product's name, and the extra that installs it.
    """
    module, product, extra = needs

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ImportError(f'{name} needs {product}; install it with: pip install "alibi-attn[{extra}]"') from error

    return load, lambda: sorted({*vars(importlib.import_module(package)), *homes})
