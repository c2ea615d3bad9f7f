"""The clock of trainings counts the processor's time where a CPU trains with one thread."""

import time

import pytest
import torch

from alibi_lab.lab.clock import clock


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_with_one_thread_work_counts_and_waiting_does_not(one_thread):
    now = clock(torch.device("cpu"))
    start, began = now(), time.process_time()
    time.sleep(0.2)
    assert now() - start < 0.1
    while time.process_time() - began < 0.05:
        pass
    assert now() - start >= 0.05


def test_on_other_devices_the_time_that_passes_counts(one_thread):
    now = clock(torch.device("cuda"))
    start = now()
    time.sleep(0.05)
    assert now() - start >= 0.05
