"""How `make docs` builds the site: Sphinx with MyST for the pages, autodoc for the docstrings, and the theme furo.

Nothing is fetched while it is built or read: no inventories of other projects, no web fonts, and formulas are text.
A warning is an error, and so is an unknown reference (`-W -n`).
"""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from alibi_attn import __version__

project = "alibi-attn"
author = "the alibi-attn authors"
copyright = "the alibi-attn authors, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
myst_heading_anchors = 4  # anchors of headings as on GitHub: [text](page.md#a-heading)

default_role = "code"  # in docstrings, `name` is code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
# Signatures contain types of other packages, whose inventories are on the web, and the TypedDicts of `Unpack`. All other names
# of this package must have a page, except internal ones that the signatures of `api/tools.md` contain.
_INTERNAL = r"alibi_attn\.(attention\.call\.spec|hf\.embedding\.pooling_config|nn\.replacement|nn\.cache\.\w+)\..*"
nitpick_ignore_regex = [("py:.*", rf"(?!alibi_(attn|lab)\b).*|alibi_attn\..*Options|{_INTERNAL}")]
autosummary_generate = False  # the pages of the API are written by hand

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False

html_theme = "furo"
html_title = "alibi-attn"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# `Slopes` and `SegmentIds` are long unions that appear in most signatures.
_ALIASES = {
    "~collections.abc.Sequence[float] | ~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~numpy.floating]]"
    " | ~torch.Tensor": "Slopes",
    "~torch.Tensor | tuple[~torch.Tensor, ~torch.Tensor] | None =": "SegmentIds | None =",
}
# In a docstring: `code`, which stays unmodified, or a character that reStructuredText would read as markup.
_MARKUP = re.compile(r"(?P<before>\w?)(?P<code>`[^`\n]*`)(?P<after>\w?)|(?!^\* )[*|]|(?<=\w)_(?!\w)")
_SECTION = re.compile(r"\w+:$")
_LIST = re.compile(r"(?<=: )(\w)\.$")  # Sphinx would read "num_heads: H." as a list
_analyze = ModuleAnalyzer.analyze


def _plain_docstring(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code`: escapes |i − j| and *rest, and turns indented blocks into formulas."""
    found: list[str] = []
    is_formula, header = False, ""
    for line in lines:
        is_indented = line.startswith("    ")
        if line and not is_indented:
            is_formula, header = False, line
        if is_indented and not is_formula and found and not found[-1] and not _SECTION.match(header):
            is_formula = True
            found += ["::", ""]
        found.append(
            line if is_formula or line.lstrip().startswith(">>>") else _LIST.sub(r"\1\\.", _MARKUP.sub(_escaped, line))
        )
    lines[:] = found


def _escaped(found: re.Match[str]) -> str:
    code = found["code"]
    if code is None:
        return "\\" + found[0]
    before, after = found["before"], found["after"]
    return (f"{before}\\ " if before else "") + code + (f"\\ {after}" if after else "")


def _short_signature(
    _app: object, _what: str, _name: str, _object: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    for long, short in _ALIASES.items():
        signature = signature and signature.replace(long, short)
    return signature, returns


def _analyze_without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Overloads differ only in `return_lse`, which the docstring explains."""
    _analyze(analyzer)
    analyzer.overloads = {}


def setup(app: Sphinx) -> None:
    ModuleAnalyzer.analyze = _analyze_without_overloads  # type: ignore[method-assign]
    app.connect("autodoc-process-docstring", _plain_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _short_signature)
