"""Reports: figures and tables, drawn from records alone and without PyTorch.

The figures are imported when they are first used, because the tables do not need matplotlib.
Next: `page.py`, which writes the page, and `series.py`, which groups the records.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alibi_lab.report.plots.bias import plot_alibi_bias
    from alibi_lab.report.plots.study import plot_run
    from alibi_lab.report.sections.heads import plot_heads

__all__ = ["plot_alibi_bias", "plot_heads", "plot_run"]

_MODULES = {"plot_alibi_bias": "plots.bias", "plot_heads": "sections.heads", "plot_run": "plots.study"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"alibi_lab.report.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib"):
            raise
        raise ImportError(f'{name} needs {error.name}; install it with: pip install ".[lab]" in a clone') from error
