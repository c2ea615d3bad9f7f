"""Context parallelism on GPUs: what ranks compute is what one device computes, then the time of its steps.

    python tests/support/interpreter/context_on_device.py results                      one process per visible device, over NCCL
    python tests/support/interpreter/context_on_device.py results --scale smoke        short sequences, as without a device

Options: --seconds S (cases and lengths not begun by then are left out). With a single device, NCCL has one rank, which plans and
exchanges with itself; two more ranks then share the device over gloo, because NCCL refuses that. Both groups start together,
because starting takes longest, and measure one after the other. Without a device two ranks share the CPU. With Triton's
interpreter the rehearsal runs the Triton kernels. It saves a record per group of processes.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import quick_interpreter
import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from alibi_attn import alibi_attention, forgetting_attention
from alibi_attn.distributed import Traffic, attention, context_parallel_attention, context_parallel_forgetting_attention
from alibi_attn.distributed.argument_check import shard_spec
from alibi_attn.distributed.exchange import Ranks, Transport
from alibi_lab.measure.harness import Row, keep

LENGTHS = {"full": (4096, 16384, 65536), "smoke": (96,)}  # rows of a rank
UNEVEN = {"full": (1500, 1100), "smoke": (70, 40)}  # rows of the first rank and of all others, in cases
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
CASES: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "symmetric, padding": {"causal": False, "padding": True},
    "gates": {"gates": True},
}
ALLOWED = {"cuda": 2.0**-5, "cpu": 1e-5}  # of the largest row: bf16 rounds outputs of parts once more, and fp32 hardly
REPEATS = 5


class World(NamedTuple):
    """A group of processes, with the device of each."""

    backend: str
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        kind = self.devices[0].split(":")[0]
        return f"context-parallel-{kind}/{self.backend}-{len(self.devices)}-on-{len(set(self.devices))}"


def worlds() -> list[World]:
    count = torch.cuda.device_count()
    if count == 0:
        return [World("gloo", ("cpu", "cpu"))]
    found = [World("nccl", tuple(f"cuda:{at}" for at in range(count)))]
    return found if count > 1 else [*found, World("gloo", ("cuda:0", "cuda:0"))]


class Rank(NamedTuple):
    """This process. Kernels are those of `backend`."""

    ranks: Ranks
    device: torch.device
    backend: str
    scale: str
    end: float

    def agreed(self, number: float) -> float:
        """The largest of all ranks."""
        numbers = self.ranks.gathered(torch.tensor([number], dtype=torch.float64, device=self.device), "numbers")
        return float(numbers.max())

    def has_time(self) -> bool:
        return self.agreed(time.time() - self.end) < 0

    def drawn(self, lengths: tuple[int, ...]) -> list[Tensor]:
        """Queries, keys, values and gradients of the output for the whole sequence, the same on all ranks."""
        generator, dtype = (
            torch.Generator().manual_seed(0),
            torch.bfloat16 if self.device.type == "cuda" else torch.float32,
        )
        shapes = [(1, heads, sum(lengths), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        return [torch.randn(shape, generator=generator).to(self.device, dtype) for shape in shapes]

    def attend(self, *inputs: Tensor, traffic: Traffic | None = None, **options: Any) -> Tensor:
        """A context-parallel call, gated if there are gates; a single rank plans and exchanges with itself too."""
        if self.ranks.count > 1:
            call = context_parallel_attention if len(inputs) == 3 else context_parallel_forgetting_attention
            output = call(*inputs, backend=self.backend, traffic=traffic, **options)
            assert isinstance(output, Tensor)
            return output
        slopes = None if len(inputs) == 3 else [0.0] * HEADS
        return self.call(*inputs)._together(shard_spec(*inputs[:3], slopes, **options), self.ranks)[0]

    def call(self, query: Tensor, key: Tensor, value: Tensor, log_fgate: Tensor | None = None) -> attention._Call:
        return attention._Call(query, key, value, log_fgate, None, self.backend, None)


def work(at: int, world: World, store: str, scale: str, begin: SimpleQueue, found: SimpleQueue) -> None:
    """One process of a group, which starts working when `begin` says until when; the first one puts its rows into `found`."""
    device = torch.device(world.devices[at])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    interprets = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if interprets:
        quick_interpreter.prepare()
    torch.set_num_threads(1)
    dist.init_process_group(world.backend, init_method=f"file://{store}", rank=at, world_size=len(world.devices))
    torch.ones(1, device=device)  # starts the device too
    try:
        rank = Rank(Ranks(None, 60.0), device, "fused" if interprets else "auto", scale, begin.get())
        for row in rows(rank):
            if at == 0:
                found.put(row)
    finally:
        dist.destroy_process_group()


def rows(rank: Rank) -> Iterator[dict[str, Row]]:
    """The cases, then the lengths: rows by peer. The first case is never left out."""
    for name, options in CASES.items():
        if rank.has_time() or name == "causal":
            error = rank.agreed(difference(rank, **options))
            yield {name: {"length": sum(case_lengths(rank)), "relative_error": error}}
            if not error <= (allowed := ALLOWED[rank.device.type]):
                raise RuntimeError(f"{name}: ranks and one device differ by {error:.1e} but {allowed:.1e} is allowed")
    for length in LENGTHS[rank.scale]:
        if rank.has_time():
            yield timed(rank, length)


def case_lengths(rank: Rank) -> tuple[int, ...]:
    first, others = UNEVEN[rank.scale]
    return (first, *[others] * (rank.ranks.count - 1))


def difference(rank: Rank, *, padding: bool = False, gates: bool = False, **options: Any) -> float:
    """The largest difference of an output or gradient of this rank from those of one device, as a share of the largest row."""
    lengths = case_lengths(rank)
    *inputs, gradient = rank.drawn(lengths)
    if gates:
        inputs.append(torch.nn.functional.logsigmoid(inputs[0].float().mean(-1) * 8))
    key_mask = torch.arange(sum(lengths), device=rank.device)[None] < sum(lengths) - lengths[0] // 3

    def of_rank(x: Tensor, axis: int = 2) -> Tensor:
        return x.split(lengths, axis)[rank.ranks.rank]

    def found(attend: Callable[..., Any], tensors: list[Tensor], gradient: Tensor, mask: Tensor) -> list[Tensor]:
        leaves = [x.detach().contiguous().requires_grad_() for x in tensors]
        output = attend(*leaves, **options, **({"key_mask": mask} if padding else {}))
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    whole = found(forgetting_attention if gates else alibi_attention, inputs, gradient, key_mask)
    ours = found(
        rank.attend,
        [of_rank(x) for x in inputs],
        of_rank(gradient),
        of_rank(key_mask, 1),
    )
    pairs = [(mine.float(), of_rank(one).float(), one.float()) for mine, one in zip(ours, whole, strict=True)]
    return max(float((mine - one).norm(dim=-1).max() / all_rows.norm(dim=-1).max()) for mine, one, all_rows in pairs)


def timed(rank: Rank, length: int) -> dict[str, Row]:
    """Milliseconds of the slowest rank: whole calls, the same calls over a rank's own keys only, planning, the exchange."""
    lengths = (length,) * rank.ranks.count
    query, key, value, gradient = (x.split(lengths, 2)[rank.ranks.rank].clone() for x in rank.drawn(lengths))
    leaves, traffic = [x.requires_grad_() for x in (query, key, value)], Traffic()
    rank.attend(query, key, value, traffic=traffic)
    received = int(rank.agreed(traffic.rows_received))
    call, spec = rank.call(query, key, value), shard_spec(query, key, value, None)
    halo, _ = call._planned(spec, rank.ranks, lengths, None, for_gradients=True)

    def own() -> Tensor:
        output = alibi_attention(query, key, value, backend=rank.backend)
        assert isinstance(output, Tensor)
        return output

    def exchange() -> None:
        with torch.no_grad():
            Transport(halo, rank.ranks).begun((key, value), "keys and values").pieces()

    def row(forward: Callable[[], Tensor]) -> Row:
        alone = median_ms(rank, forward)
        step = median_ms(rank, lambda: torch.autograd.grad(forward(), leaves, gradient))
        return {"length": length, "forward_ms": alone, "backward_ms": step - alone}

    return {
        "ours": {**row(lambda: rank.attend(query, key, value)), "rows_received": received},
        "own keys only": row(own),
        "plan": {
            "length": length,
            "forward_ms": median_ms(rank, lambda: call._planned(spec, rank.ranks, lengths, None, for_gradients=True)),
        },
        "exchange": {"length": length, "forward_ms": median_ms(rank, exchange)},
    }


def median_ms(rank: Rank, call: Callable[[], object]) -> float:
    """The median of the slowest rank, with all ranks starting together."""
    taken = []
    for _ in range(REPEATS):
        rank.agreed(0.0)
        start = time.perf_counter()
        call()
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return rank.agreed(statistics.median(taken[1:]) * 1e3)


def followed(group: Any, begin: SimpleQueue, found: SimpleQueue, end: float) -> Iterator[dict[str, Row]]:
    """The rows of a group that waits for `begin`, each when it is there."""
    for _ in group.processes:
        begin.put(end)
    is_done, failure = False, None
    while not is_done:
        try:
            is_done = group.join(timeout=0.1)
        except ProcessException as error:
            is_done, failure = True, error
        while not found.empty():
            yield found.get()
    if failure is not None:
        raise failure


def main(out: Path, scale: str, seconds: float) -> None:
    end, groups, queue = time.time() + seconds, worlds(), multiprocessing.get_context("spawn").SimpleQueue

    def steps() -> Iterator[Mapping[str, Mapping[str, Row]]]:
        with tempfile.TemporaryDirectory() as place:
            queues = [(queue(), queue()) for _ in groups]
            started = []
            try:
                for world, pair in zip(groups, queues, strict=True):
                    given = world, f"{place}/{len(started)}", scale, *pair
                    started.append(spawn(work, given, nprocs=len(world.devices), join=False))
                for number, (world, pair, group) in enumerate(zip(groups, queues, started, strict=True)):
                    share = (end - time.time()) / (len(groups) - number)
                    yield from ({world.name: row} for row in followed(group, *pair, time.time() + share))
            finally:
                for process in (process for group in started for process in group.processes):
                    process.kill()
                    process.join()

    configs = {
        world.name: {
            "backend": world.backend,
            "ranks": len(world.devices),
            "devices": list(world.devices),
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "float32" if world.devices[0] == "cpu" else "bfloat16",
            "lengths_of_a_rank": list(LENGTHS[scale]),
        }
        for world in groups
    }
    keep(out, configs, steps(), say=print)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", choices=LENGTHS, default="full")
    parser.add_argument("--seconds", type=float, default=120.0)
    asked = parser.parse_args()
    sys.exit(main(asked.out, asked.scale if torch.cuda.is_available() else "smoke", asked.seconds))
