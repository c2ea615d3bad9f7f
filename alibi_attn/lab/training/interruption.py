"""Ctrl-C, and the SIGTERM that clusters and launchers send: heard at once, answered where nothing is lost."""

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Inside, the first signal of each kind only answers True to the function that this yields; a second is the usual one.

    Each kind on its own, because torchrun answers Ctrl-C, which its processes hear too, by sending them SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python delivers signals to the main thread only
        return
    seen: set[int] = set()  # no lock, as an Event has: a signal may come while another one's handler has it
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def remember(number: int, frame: types.FrameType | None) -> None:
        seen.add(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in SIGNALS:
        signal.signal(number, remember)
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
