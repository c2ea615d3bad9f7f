"""Defers Ctrl-C, and the SIGTERM that clusters and launchers send, to the end of the current step."""

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after a first signal; a second signal of the same kind has its usual effect.

    The kinds are separate because on Ctrl-C, which its processes receive too, torchrun also sends them SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python delivers signals to the main thread only
        return
    seen: set[int] = set()  # not an Event, because a signal may arrive while another handler holds its lock
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
