"""Makes a repository for Hugging Face's `kernels` from the wheels of `release/wheels.py`.

    python release/hub_kernel.py dist build/hub-kernel        # then upload the folder

`get_kernel` loads `build/torch-cpu/` or `build/torch-cuda/` under a name of its own, so that versions can live in one process:
imports are relative, and operators are registered in a namespace with a digest of the content. The folders hold the attention
functions and the C++ kernels of all wheels, which depend on neither torch nor Python. Layers and models stay in the wheel.
"""

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from wheels import NAME

from alibi_attn import _HOMES, __version__

PACKAGE = "alibi_attn"
BACKENDS = "cpu", "cuda"
VERSION = 1  # of the functions' interface; users ask for it: get_kernel(repository, version=1)
# Not a part: the package's own list of names, and modules that need more than the attention functions.
LEFT_OUT = "__init__.py", "__main__.py", "inspect.py"
HOMES = {name: home for home, names in _HOMES.items() if not home.startswith(f"{PACKAGE}.nn") for name in names}
# Older versions of `kernels` load the folder with the repository's name.
OLDER = '''"""The same names, for versions of `kernels` that load this folder."""

import importlib.util
import sys
from pathlib import Path

if "{identity}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("{identity}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{identity}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{identity}"])
__all__ = sys.modules["{identity}"].__all__
globals().update({{name: getattr(sys.modules["{identity}"], name) for name in __all__}})
'''
CARD = f"""---
library_name: kernels
license: apache-2.0
tags: [kernels]
---

# {PACKAGE}

Exact attention with linear biases (ALiBi), forward and backward. C++ kernels for CPUs, Triton kernels for GPUs.

```python
from kernels import get_kernel

attention = get_kernel("OWNER/alibi-attn", version={VERSION}, trust_remote_code=True)
output = attention.alibi_attention(query, key, value)  # [B, H, T, D]; the published slopes
```

Python 3.11 or newer, PyTorch 2.11 or newer and NumPy. Functions: {", ".join(f"`{name}`" for name in HOMES)}.
Made from alibi-attn {__version__}.
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    found = sorted(options.wheels.glob(f"{NAME}-*.whl"))
    assert found, f"{options.wheels} has no wheels; make them with `python release/wheels.py {options.wheels}`"
    files: dict[str, bytes] = {}
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            files |= {name: archive.read(name) for name in archive.namelist()}
    for name, data in repository(files).items():
        path = options.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"{options.out}: {', '.join(f'build/torch-{backend}' for backend in BACKENDS)}", flush=True)


def repository(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of the repository, from those of the wheels."""
    kept = {name.removeprefix(f"{PACKAGE}/"): data for name, data in sorted(files.items()) if _is_part(name)}
    digest = hashlib.sha256(b"".join(name.encode() + data for name, data in kept.items())).hexdigest()[:12]
    made = {"README.md": CARD.encode()}
    for backend in BACKENDS:
        identity = f"_{PACKAGE}_{backend}_{digest}"
        variant = {name: _moved(name, data, identity) for name, data in kept.items()}
        variant["__init__.py"] = _names().encode()
        variant[f"{PACKAGE}/__init__.py"] = OLDER.format(identity=identity).encode()
        variant["metadata.json"] = _metadata(identity, backend).encode()
        made |= {f"build/torch-{backend}/{name}": data for name, data in variant.items()}
    return made


def _is_part(name: str) -> bool:
    folder, _, rest = name.partition("/")
    one_module = "/" not in rest and rest.endswith(".py") and rest not in LEFT_OUT
    return folder == PACKAGE and (one_module or rest.startswith("attention/"))


def _moved(name: str, data: bytes, identity: str) -> bytes:
    """A module with relative imports, and with its operators in the namespace `identity`."""
    if not name.endswith(".py"):
        return data
    text = re.sub(rf"^(\s*from ){PACKAGE}\.", rf"\1{'.' * name.count('/')}.", data.decode(), flags=re.MULTILINE)
    return text.replace(f"{PACKAGE}::", f"{identity}::").encode()


def _names() -> str:
    imports = "".join(f"from .{home.removeprefix(f'{PACKAGE}.')} import {name}\n" for name, home in HOMES.items())
    return f'"""Attention with linear biases (ALiBi)."""\n\n{imports}\n__all__ = {list(HOMES)}\n'


def _metadata(identity: str, backend: str) -> str:
    about = {
        "name": PACKAGE.replace("_", "-"),
        "id": identity,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(about, indent=2) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
