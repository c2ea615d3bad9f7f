"""Tables of refusals: what an error says, and the call that raises it."""

from collections.abc import Callable

import pytest


def assert_refused(*rows: tuple[str, Callable[[], object]], error: type[Exception] = ValueError) -> None:
    """Every call raises this kind of error, and its text matches the pattern before the call."""
    for pattern, call in rows:
        with pytest.raises(error, match=pattern):
            call()
