"""Attention from several Python threads, in DataLoader workers after a first call, and under `accelerate launch`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import printed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alibi_attn import alibi_attention

CALLS = 6


def gradients(seed: int, backend: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(2, 4, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    output = alibi_attention(*leaves, backend=backend)
    return torch.cat([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])


class Attended(Dataset[Tensor]):
    def __len__(self) -> int:
        return CALLS

    def __getitem__(self, seed: int) -> Tensor:
        return gradients(seed, "native")


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This DataLoader will create")  # on one processor
def test_dataloader_workers_attend_after_their_parent_did() -> None:
    """Workers are forks with one thread. A fork with more threads hangs in libgomp, with any operator of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = [gradients(seed, "native") for seed in range(CALLS)]
    torch.set_num_threads(2)
    try:
        gradients(0, "native")
        loader = DataLoader(Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert all(torch.equal(found, right) for found, right in zip(loader, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


OWN_THREADS = """
import ctypes, os, threading, torch
from alibi_attn import alibi_attention
from alibi_attn.attention.backends.native import build

def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.float32, torch.float64)[seed % 2]
    leaves = [torch.randn(2, 4, 200, 16, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]
    output = alibi_attention(*leaves, backend="native")
    return output.detach(), *torch.autograd.grad(output.sum(), leaves)

def assert_right(seed):  # in tensors so small that torch computes with one thread, because its own threads hang after a fork
    assert all(map(torch.equal, gradients(seed), alone[seed])), seed

def count():
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

torch.set_num_threads(3)
threads = build.library(part="threads")
alone = [gradients(seed) for seed in range(6)]  # on the threads of torch's OpenMP, where it has one
before = count()
threads.alibi_only_own_threads(ctypes.c_int64(1))
running = [threading.Thread(target=lambda seed=seed: [assert_right(seed) for _ in range(20)]) for seed in range(6)]
for thread in running: thread.start()
for thread in running: thread.join()
if hasattr(os, "fork"):
    child = os.fork()  # without the parent's threads
    if child == 0:
        assert_right(0), assert_right(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for seed in range(6): assert_right(seed)
# fp32 and fp64, whose kernels are two libraries, run on the two workers of one pool.
assert count() - before in (0, 2), count() - before
print("right")
"""


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_native_on_its_own_threads_gives_the_same_bits_in_threads_and_forks() -> None:
    """Simulates the absence of torch's OpenMP: macOS, Windows, and JAX alone."""
    assert printed("-W", "ignore", "-c", OWN_THREADS).startswith("right")


WITHOUT_THREADS = """
import ctypes, os, torch
from alibi_attn import alibi_attention
from alibi_attn.attention.backends.native import build

build.library(part="threads").alibi_only_own_threads(ctypes.c_int64(1))
torch.set_num_threads(4)
query, key, value = torch.randn(3, 1, 4, 300, 16)
before = len(os.listdir("/proc/self/task"))
output = alibi_attention(query, key, value, backend="native")
assert len(os.listdir("/proc/self/task")) == before
torch.set_num_threads(1)
assert torch.equal(output, alibi_attention(query, key, value, backend="native"))
print("right")
"""
REFUSED = 'extern "C" int pthread_create(void *, const void *, void *(*)(void *), void *) { return 11; }'  # EAGAIN


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="refusing threads needs g++ on Linux")
def test_native_computes_without_threads_that_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "refused.cpp").write_text(REFUSED)
    subprocess.run(["g++", "-shared", "-fPIC", "refused.cpp", "-o", "refused.so"], cwd=tmp_path, check=True)
    environment = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(tmp_path / "refused.so")}
    assert printed("-W", "ignore", "-c", WITHOUT_THREADS, **environment) == "right\n"
