"""Adds up the processor time of a test run, for `pytest --processor-time`: per test file, and of importing and collecting.

A file's time is that of its process and of the processes that it started and waited for, on all cores. It hardly depends on what
else the machine does, unlike the time on a clock.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

COLLECTING = "(starting, importing and collecting)"


class ProcessorTime:
    """A pytest plugin that counts the seconds of this process, and prints the sum over all of xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _processor_seconds()
        result = yield
        self.seconds[item.nodeid.partition("::")[0]] += _processor_seconds() - before
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.seconds[COLLECTING] = _processor_seconds()

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["processor_seconds"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("processor_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"processor time: {self.seconds.total() / 60:.1f} minutes")
        for name, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")


def _processor_seconds() -> float:
    return sum(os.times()[:4])
