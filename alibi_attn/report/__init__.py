"""Reports: figures, tables and sentences, drawn from records alone and without PyTorch.

`plot_alibi_bias` is imported when it is first used, because the tables do not need matplotlib.
Next: `page.py`, which writes the page, and `series.py`, which groups the records.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alibi_attn.report.plots.bias import plot_alibi_bias

__all__ = ["plot_alibi_bias"]


def __getattr__(name: str) -> object:
    if name != "plot_alibi_bias":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from alibi_attn.report.plots import bias
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ImportError(f'{name} needs matplotlib; install it with: pip install "alibi-attn[lab]"') from error
    return bias.plot_alibi_bias
