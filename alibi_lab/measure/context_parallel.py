"""`alibi bench context-parallel`: one sequence on several local processes: halos compared with an all-gather of keys and values,
in rows and time.

Both compute a rank's queries with the same kernel; they differ in the rows of keys and values that they send. On one
machine, sending a row costs a copy through a socket. A network is slower, so the times say little about a cluster, but
the numbers of rows and bytes are the same there. The code that sends rows counts them.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from alibi_attn import alibi_attention
from alibi_attn.distributed import Traffic, context_parallel_attention
from alibi_lab import records
from alibi_lab.measure import timing
from alibi_lab.measure.harness import Columns, Config, Row, Rows, Say, keep, number, whole_ms

LENGTHS = (16_384, 32_768, 65_536, 131_072)
RANKS = (2, 4)
HEADS, HEAD_DIM = 8, 64
OURS, GATHER = "ours", "all-gather"
PEERS: dict[str, records.Json] = {
    OURS: "context_parallel_attention",
    GATHER: "all_gather of key and value, then the same kernel",
}
# Outputs and gradients of the two differ by rounding (fp32 sums in another order) and by the mass that the tolerance drops.
_ALLOWED = 1e-5


def context_parallel(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    ranks: Sequence[int] = RANKS,
    repeats: int = 5,
    seconds: float = 20.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per number of processes, and returns their paths.

    8 heads of 64, fp32, causal, the published slopes, noise; shards of equal length. The processes share torch's threads.

    Args:
        lengths: sequence lengths, as in 16384,65536; default 16384 … 131072.
        ranks: numbers of processes, as in 2,4; default 2,4.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length.

    Raises:
        ValueError: a number of ranks below 2, or one that does not divide a length.
        RuntimeError: ours and the all-gather differ by more than rounding.
    """
    for count in ranks:
        uneven = [length for length in lengths if length % count]
        if count < 2 or uneven:
            raise ValueError(
                f"{count} ranks cannot share {uneven} tokens evenly; pass two or more ranks, and lengths that they divide"
            )
    config: Config = {
        "lengths": list(lengths), "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32",
        "causal": True, "backend": "gloo", "peers": PEERS,
    }  # fmt: skip
    configs: dict[str, Config] = {
        f"context-parallel/ranks-{count}": {**config, "ranks": count, "threads_of_a_rank": _threads(count)}
        for count in ranks
    }

    def rows(count: int, length: int) -> Rows:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            processes = [stack.enter_context(timing.fresh_process(_threads(count))) for _ in range(count)]
            given = count, length, Path(folder) / "store", repeats, seconds
            working = [process.submit(_work, rank, *given) for rank, process in enumerate(processes)]
            return timing.result(working[0], "a rank", "pass shorter --lengths")

    steps = ({f"context-parallel/ranks-{count}": rows(count, length)} for count in ranks for length in sorted(lengths))
    return keep(out, configs, steps, summary=_summary, say=say)


def _threads(ranks: int) -> int:
    return max(1, torch.get_num_threads() // ranks)


def _work(rank: int, count: int, length: int, store: Path, repeats: int, seconds: float) -> dict[str, Row]:
    """The rows of one rank, which are the same in all."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        return _measured(rank, count, length, repeats, seconds)
    finally:
        dist.destroy_process_group()


def _measured(rank: int, count: int, length: int, repeats: int, seconds: float) -> dict[str, Row]:
    generator = torch.Generator().manual_seed(rank)
    shape = (1, HEADS, length // count, HEAD_DIM)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    traffic, gathered = Traffic(), cast("Callable[[Tensor], Tensor]", _Gathered.apply)
    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: context_parallel_attention(query, key, value, traffic=traffic),
        GATHER: lambda: alibi_attention(query, gathered(key), gathered(value), query_offset=rank * query.shape[2]),
    }
    results = [_once(call, leaves, grad)[0] for call in calls.values()]
    # The norm of the largest row difference, as a share of the largest row norm.
    error = max(float((x - y).norm(dim=-1).max() / y.norm(dim=-1).max()) for x, y in zip(*results, strict=True))
    numbers = torch.tensor([error, traffic.rows_received, traffic.bytes_received], dtype=torch.float64)
    everywhere = torch.stack(_of_all(numbers))
    error = float(everywhere[:, 0].max())
    if not error <= _ALLOWED:
        raise RuntimeError(
            f"context_parallel_attention and an all-gather differ by {error:.1e} at {length} tokens but {_ALLOWED:.0e} is allowed"
        )
    times = _times(calls, leaves, grad, repeats, seconds)
    other_rows = (count - 1) * length * HEADS
    received = {
        OURS: everywhere[:, 1:].sum(0).long().tolist(),
        GATHER: [other_rows, 2 * other_rows * 2 * HEAD_DIM * 4],  # gradients are sent too
    }
    columns = ("length", "relative_error", "forward_ms", "backward_ms", "rows_received", "bytes_received")
    return {name: dict(zip(columns, (length, error, *times[name], *received[name]), strict=True)) for name in calls}


def _times(
    calls: Mapping[str, Callable[[], Tensor]], leaves: list[Tensor], grad: Tensor, repeats: int, seconds: float
) -> dict[str, list[float]]:
    """Medians of [forward, backward] in milliseconds, each of the slowest rank; the peers take turns."""
    spent: dict[str, list[Tensor]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for turn in range(repeats):
        late = _of_all(torch.tensor([float(turn > 0 and time.perf_counter() > end)]))
        if any(late):
            break
        for name, call in calls.items():
            dist.barrier()
            times = torch.tensor(_once(call, leaves, grad)[1], dtype=torch.float64)
            spent[name].append(torch.stack(_of_all(times)).amax(0))
    return {name: torch.stack(turns).quantile(0.5, 0).tolist() for name, turns in spent.items()}


def _once(call: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[list[Tensor], list[float]]:
    """(output and gradients, milliseconds of forward and backward) of one call."""
    begun = time.perf_counter()
    output = call()
    between = time.perf_counter()
    gradients = torch.autograd.grad(output, leaves, grad)
    times = [(between - begun) * 1e3, (time.perf_counter() - between) * 1e3]
    return [output.detach(), *gradients], times


def _of_all(values: Tensor) -> list[Tensor]:
    """The values of all ranks."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return gathered


class _Gathered(torch.autograd.Function):
    """Gathers the rows of all ranks; backward sums the gradients and scatters them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.cat(_of_all(rows.detach()), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def _summary(name: str, columns: Columns) -> dict[str, float | None]:
    """The ratio of an all-gather to ours at the longest length, in time and in rows."""
    ours, gather = ({key: column[-1] for key, column in columns[peer].items()} for peer in (OURS, GATHER))
    return {
        "time of an all-gather over ours": whole_ms(gather) / whole_ms(ours),
        "rows of an all-gather over ours": number(gather["rows_received"]) / number(ours["rows_received"]),
    }
