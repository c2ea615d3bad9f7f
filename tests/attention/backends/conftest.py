"""One process with Triton's interpreter, shared by all files that need it, because starting it takes seconds.

A test that uses the fixture without an argument for it (`pytest.mark.usefixtures`) runs in that process itself.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import fused_in_interpreter
import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with fused_in_interpreter.interpreter() as executor:
        yield executor


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    names = pyfuncitem._fixtureinfo.argnames
    if "interpreter" not in pyfuncitem.fixturenames or "interpreter" in names:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in names}
    inside = pyfuncitem.funcargs["interpreter"].submit(
        fused_in_interpreter.run_test, str(pyfuncitem.path), pyfuncitem.originalname, given
    )
    inside.result()
    return True
