"""Signals are deferred until no work would be lost."""

import signal
import sys

import pytest

from alibi_lab.lab.training.interruption import deferred_interruption


@pytest.fixture
def quiet_signals():
    """Signal handlers that do nothing."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("event", range(1, 12))
def test_a_signal_may_come_while_another_is_being_remembered(quiet_signals, event):
    """The second signal arrives at each call and return inside the first one's handler in turn."""
    left = event

    def interrupt(frame, kind, arg):
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)

    with deferred_interruption() as interrupted:
        assert not interrupted()
        sys.setprofile(interrupt)
        signal.raise_signal(signal.SIGTERM)
        sys.setprofile(None)
        assert interrupted()


def test_the_second_signal_of_a_kind_is_the_usual_one(quiet_signals):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with deferred_interruption() as interrupted:
        signal.raise_signal(signal.SIGTERM)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # another kind: its first
