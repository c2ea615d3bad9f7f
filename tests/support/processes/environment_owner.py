"""Checks whether this environment has another checkout's package, which `make test` must not replace.

    BIN/python tests/support/processes/environment_owner.py VENV CHECKOUT

exits with 2 and a sentence if alibi-attn is installed from elsewhere; with 0 if it is CHECKOUT's or not installed.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def installed_from() -> str | None:
    """The folder, wheel or index that the package was installed from; None if there is none."""
    try:
        source = distribution("alibi-attn").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return unquote(urlsplit(json.loads(source)["url"]).path) if source else "a package index"


def main(venv: str, checkout: str) -> None:
    source, here = installed_from(), Path(checkout).resolve()
    inside = Path(venv).resolve().is_relative_to(here)  # .venv, also after the checkout was moved
    if source is not None and not inside and Path(source).resolve() != here:
        print(
            f"{venv} has alibi-attn from {source}, not from {checkout}: run `make setup VENV={venv}` to replace it, "
            "or pass another VENV",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    main(*sys.argv[1:])
