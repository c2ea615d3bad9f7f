"""Public names of a package that are loaded when they are first used, so that importing the package loads no framework."""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping

_BIAS = "alibi_bias(alibi_slopes(num_heads), query_len, key_len)"
_LAYER = "ALiBiAttention(embed_dim, num_heads)"
_BLOCK = "ALiBiTransformerBlock(embed_dim, num_heads, ffn_dim)"
# Functions, classes and methods of tutorials and other libraries, and ours.
OURS = {
    **dict.fromkeys(("get_alibi_slopes", "get_slopes", "_get_slopes", "_get_alibi_slopes"), "alibi_slopes(num_heads)"),
    **dict.fromkeys(("build_alibi_tensor", "build_mpt_alibi_tensor", "build_alibi_bias", "get_alibi_bias"), _BIAS),
    **dict.fromkeys(
        ("visualize_alibi_bias", "plot_alibi_bias"), "alibi_lab.report.plot_alibi_bias(num_heads, seq_len)"
    ),
    **dict.fromkeys(("ALiBiMultiHeadAttention", "MultiHeadAttention", "AttentionWithALiBi"), _LAYER),
    **dict.fromkeys(("TransformerBlock", "ALiBiBlock", "ALiBiTransformer"), _BLOCK),
    **dict.fromkeys(("ALiBi", "AlibiPositionalBias", "ALiBiBias"), "ALiBiPositionalBias(num_heads)"),
    "get_bias": "bias(query_len)",
    "get_bias_for_kv_cache": "bias(query_len, key_len)",
}
_PACKAGES = "alibi_attn.hf", "alibi_attn.nn", "alibi_attn.distributed"  # whose public names are not all in `alibi_attn`


def missing(package: str, name: str) -> Exception:
    """The error for a name that a package does not have.

    Python reports the message of an ImportError for `from package import name`, but not that of an AttributeError.
    """
    if name in OURS:
        return ImportError(f"{package} has no {name!r}; here it is {OURS[name]}")
    advice = ""
    if not name.startswith("_"):
        for home in _PACKAGES:
            if home != package and name in _public_names(home):
                return ImportError(f"{package} has no {name!r}; here it is {home}.{name}")
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            advice = f"; it is a module: import {package}.{name}"
    return AttributeError(f"module {package!r} has no attribute {name!r}{advice}")


def _public_names(package: str) -> list[str]:
    """`__all__` of a package that is not imported, because that would load a framework."""
    spec = importlib.util.find_spec(package)
    source = None if spec is None else spec.loader.get_source(package)  # type: ignore[union-attr]
    for statement in ast.parse(source or "").body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return []


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]], needs: tuple[str, str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        homes: the names of every module.
        needs: a module that the names may need, its product's name, and the extra that installs it.
    """
    module, product, extra = needs
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in home_of:
            raise missing(package, name)
        try:
            return getattr(importlib.import_module(home_of[name]), name)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ImportError(
                f'{name} needs {product}; install it with: pip install ".[{extra}]" in a clone'
            ) from error

    return load, lambda: sorted({*vars(importlib.import_module(package)), *home_of})
