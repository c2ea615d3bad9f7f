"""Python imports this module when it starts: it hides processor features from this process (see `lesser_processor.py`).

Next to it are `cpuinfo`, which is read in place of /proc/cpuinfo, and `hidden`, the names that torch must not report.
"""

import builtins
import importlib.util
import io
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
_open = io.open


def open_lesser(file, *arguments, **options):
    """`open`, with /proc/cpuinfo replaced."""
    is_path = isinstance(file, str | os.PathLike)
    return _open(FOLDER / "cpuinfo" if is_path and os.fspath(file) == "/proc/cpuinfo" else file, *arguments, **options)


def hide_in(module):
    """Changes what `torch.cpu` reports."""
    hidden, reported = (FOLDER / "hidden").read_text().split(), module.get_capabilities
    module.get_capabilities = lambda: {**reported(), **dict.fromkeys(hidden, False)}


class HiddenFromTorch:
    """An import hook that changes `torch.cpu` when it is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_then_hide(module):
            run(module)
            hide_in(module)

        spec.loader.exec_module = run_then_hide
        return spec


builtins.open = io.open = open_lesser
if "torch.cpu" in sys.modules:  # imported by the conftest.py of a folder that pytest was called for
    hide_in(sys.modules["torch.cpu"])
else:
    sys.meta_path.insert(0, HiddenFromTorch())
