"""Attention from several Python threads, in DataLoader workers after it has run, and `alibi run` under `accelerate launch`."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from attention_checks import ON_CPU
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alibi_attn import alibi_attention, records

CALLS = 6


def gradients(seed: int, backend: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(2, 4, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    output = alibi_attention(*leaves, backend=backend)
    return torch.cat([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])


@pytest.mark.parametrize("backend", ON_CPU)
def test_concurrent_python_threads_get_the_bits_of_a_single_one(backend: str) -> None:
    alone, together = [gradients(seed, backend) for seed in range(CALLS)], [torch.empty(0)] * CALLS

    def run(seed: int) -> None:
        together[seed] = gradients(seed, backend)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


class Attended(Dataset[Tensor]):
    def __len__(self) -> int:
        return CALLS

    def __getitem__(self, seed: int) -> Tensor:
        return gradients(seed, "native")


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_dataloader_workers_attend_after_their_parent_did() -> None:
    """Workers are forks with one thread. A plain fork with more threads hangs in libgomp, with any operator of torch."""
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


@pytest.mark.long
def test_alibi_run_under_accelerate_launch_records_every_run_once(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu", "-m"]
    command = [*launch, "alibi_attn", "run", "quick", "--scale", "smoke", "--no-report", "--out", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [record.kind for record in records.find(tmp_path / "records")]
    assert sorted(found) == ["evaluation"] * 4 + ["training"] * 4
