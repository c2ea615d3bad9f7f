"""Freed memory is kept inside `kept_memory`, and returned afterwards."""

import sys

import pytest
import torch
from programs import printed

from alibi_attn.nn import allocator

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's allocator has these settings")

# 64 MiB of new memory cause 16,384 faults of 4 KiB pages, or 32 with huge pages, which are disabled here.
SCRIPT = """
import ctypes, resource
import torch
from alibi_attn.nn.allocator import kept_memory

def faults(loops):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(loops):
        torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
faults(2)
outside = faults(5)
with kept_memory():
    faults(20)  # until the gaps next to aligned buffers stay the same
    with kept_memory():
        pass
    inside = faults(5)
    kept = resident_mib()
after, given_back = faults(5), kept - resident_mib()
with kept_memory(most_mib=300):  # of which 64 are the buffer
    faults(3)
with kept_memory(most_mib=300):
    next_block = faults(5)
before = resident_mib()
for n in range(1, 13):  # each block leaves 20 MiB more than the one before: too little for one block, but not for all
    with kept_memory(most_mib=100):
        torch.ones(n * 5 * 2**20)
all_blocks = resident_mib() - before
print(outside, inside, after, given_back, next_block, all_blocks)
"""


@glibc
def test_a_freed_buffer_is_used_again_inside_and_given_back_outside() -> None:
    outside, inside, after, given_back_mib, next_block, all_blocks_mib = map(float, printed("-c", SCRIPT).split())
    assert inside < outside / 10
    assert after > outside / 6  # at least one of five is new: free parts of the heap may serve the others
    assert given_back_mib > 50
    assert next_block < outside / 10, "the memory of a small block is not kept for the next one"
    assert all_blocks_mib < 120, "the memory that many blocks left together was not returned"


# The layers of this encoder allocate the same buffers, of 34, 17 and 17 MiB.
ENCODER = """
import contextlib, ctypes, os, resource
import torch
from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.nn import allocator

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
torch.set_num_threads(1)
if child := os.fork():  # a process for each way: the first one would leave its heap to the second
    os.waitpid(child, 0)
    allocator.kept_memory = lambda most_mib: contextlib.nullcontext()
sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 1, "intermediate_size": 1088}
model = ALiBiBertModel(ALiBiBertConfig(**sizes, vocab_size=50, pooler=False)).eval()
ids = torch.ones(1, 4096, dtype=torch.long)
with torch.no_grad():
    model(ids)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(ids)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
"""
# Those that glibc starts with. Unless they are set, it raises them, and a buffer may by chance fit into the freed memory
# that it then keeps, or into a gap. A process that keeps its memory sets its own.
LIMITS = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@glibc
def test_a_layer_of_an_encoder_takes_the_memory_that_the_layer_before_freed() -> None:
    kept, given_back = map(int, printed("-c", ENCODER, **LIMITS).split())
    assert kept < given_back / 3


def test_a_system_without_proc_reports_no_peak(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(allocator, "Path", lambda path: tmp_path / "none")
    assert allocator.peak_memory_bytes(torch.device("cpu")) is None
