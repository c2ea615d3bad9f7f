"""`alibi bench context-parallel`: a sequence on a few local processes, ours against an all-gather of keys and values.

Both compute a rank's queries with the same kernel of ours; they differ in which rows travel. On one machine a row costs a copy
through a socket, where a network would cost more, so times tell little of a cluster; rows and bytes are what would travel there.
Rows are counted by the code that sends them.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from alibi_attn import records
from alibi_attn.attention.api import alibi_attention
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.columns import Columns
from alibi_attn.distributed import Traffic, context_parallel_attention

LENGTHS = (16_384, 32_768, 65_536, 131_072)
RANKS = (2, 4)
HEADS, HEAD_DIM = 8, 64
OURS, GATHER = "ours", "all-gather"
# Outputs and gradients of the two differ by the rounding of fp32 sums in another order, and by what tolerances drop.
_ALLOWED = 1e-5


def context_parallel(
    out: Path, *, lengths: Sequence[int] = LENGTHS, ranks: Sequence[int] = RANKS, repeats: int = 5, budget_s: float = 20.0,
    say: Callable[[str], None] = print,
) -> list[Path]:  # fmt: skip
    """Measure and keep one record for every number of processes; returns their paths.

    8 heads of 64, fp32, causal, the published slopes, noise; shards of one length. A process has its share of torch's threads.

    Raises:
        ValueError: a length that the ranks do not divide.
        RuntimeError: ours and the all-gather differ by more than rounding.
    """
    for count in ranks:
        uneven = [length for length in lengths if length % count]
        if count < 2 or uneven:
            raise ValueError(
                f"{count} ranks cannot share {uneven} tokens evenly; pass lengths that two or more ranks divide"
            )
    configs: dict[str, dict[str, records.Json]] = {
        f"ranks-{count}": {
            "ranks": count, "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "causal": True,
            "threads_of_a_rank": _threads(count), "lengths": list(lengths), "backend": "gloo",
            "peers": {OURS: "context_parallel_attention", GATHER: "all_gather of key and value, then the same kernel"},
        }
        for count in ranks
    }  # fmt: skip

    def measure(kind: str, length: int) -> Mapping[str, Mapping[str, records.Json]]:
        count = int(kind.removeprefix("ranks-"))
        with tempfile.TemporaryDirectory() as folder:
            given = count, length, Path(folder), repeats, budget_s
            spawn(_work, given, nprocs=count)
            rows: dict[str, dict[str, records.Json]] = json.loads((Path(folder) / "rows.json").read_text())
        say(_sentence(count, rows))
        return rows

    return records_by_kind(
        out, "context-parallel", configs, lengths=lengths, measure=measure, train_step=None, summary=_summary, say=say
    )


def _threads(ranks: int) -> int:
    return max(1, torch.get_num_threads() // ranks)


def _sentence(count: int, rows: Mapping[str, Mapping[str, records.Json]]) -> str:
    ours, gather = ({name: float(x) for name, x in rows[peer].items()} for peer in (OURS, GATHER))  # type: ignore[arg-type]
    times = [peer["forward_ms"] + peer["backward_ms"] for peer in (ours, gather)]
    return (
        f"{count} ranks, {ours['length']:>7.0f} tokens: ours {times[0]:.0f} ms, all-gather {times[1]:.0f} ms "
        f"({times[1] / times[0]:.2f}×); rows received {ours['rows_received']:.0f} of {gather['rows_received']:.0f} "
        f"(1/{gather['rows_received'] / ours['rows_received']:.1f}); they differ by {ours['relative_error']:.1e}"
    )


def _work(rank: int, count: int, length: int, folder: Path, repeats: int, budget_s: float) -> None:
    """One process; the first one leaves rows.json in the folder."""
    torch.set_num_threads(_threads(count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        rows = _measured(rank, count, length, repeats, budget_s)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


def _measured(rank: int, count: int, length: int, repeats: int, budget_s: float) -> dict[str, dict[str, records.Json]]:
    generator = torch.Generator().manual_seed(rank)
    shape = (1, HEADS, length // count, HEAD_DIM)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    traffic = Traffic()
    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: context_parallel_attention(query, key, value, traffic=traffic),
        GATHER: lambda: alibi_attention(
            query, _gathered(key), _gathered(value), query_offset=rank * query.shape[2], causal=True
        ),
    }
    found = {name: _computed(call, leaves, grad) for name, call in calls.items()}
    of_call = vars(traffic).copy()
    error = max(_difference(ours, gather) for ours, gather in zip(*found.values(), strict=True))
    numbers = torch.tensor([error, of_call["rows_received"], of_call["bytes_received"]], dtype=torch.float64)
    everywhere = _of_all(numbers, count)
    error = float(everywhere[:, 0].max())
    if not error <= _ALLOWED:
        raise RuntimeError(
            f"context_parallel_attention and an all-gather differ by {error:.1e} at {length} tokens, {_ALLOWED:.0e} is allowed"
        )
    times = _times(calls, leaves, grad, count, repeats, budget_s)
    other_rows = count * (count - 1) * (length // count) * HEADS
    row_bytes = 2 * HEAD_DIM * 4
    received = {
        OURS: [int(n) for n in everywhere[:, 1:].sum(0).tolist()],
        GATHER: [other_rows, 2 * other_rows * row_bytes],  # gradients travel too
    }
    return {
        name: {
            "length": length, "relative_error": error, "forward_ms": times[name][0], "backward_ms": times[name][1],
            "rows_received": received[name][0], "bytes_received": received[name][1],
        }
        for name in calls
    }  # fmt: skip


def _computed(call: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    output = call()
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _difference(ours: Tensor, other: Tensor) -> float:
    """The longest difference of rows, as a share of the longest row."""
    return float((ours - other).norm(dim=-1).max() / other.norm(dim=-1).max())


def _times(
    calls: Mapping[str, Callable[[], Tensor]],
    leaves: list[Tensor],
    grad: Tensor,
    count: int,
    repeats: int,
    budget_s: float,
) -> dict[str, tuple[float, float]]:
    """Medians of (forward, backward) in milliseconds, of the rank that was last; the peers take turns."""
    spent: dict[str, list[list[float]]] = {name: [] for name in calls}
    end = time.perf_counter() + budget_s
    for turn in range(repeats):
        late = _of_all(torch.tensor([float(turn > 0 and time.perf_counter() > end)]), count)
        if bool(late.any()):
            break
        for name, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            output = call()
            between = time.perf_counter()
            torch.autograd.grad(output, leaves, grad)
            mine = torch.tensor([between - begun, time.perf_counter() - between], dtype=torch.float64)
            spent[name].append((_of_all(mine, count).amax(0) * 1e3).tolist())
    return {
        name: (statistics.median(turn[0] for turn in turns), statistics.median(turn[1] for turn in turns))
        for name, turns in spent.items()
    }


def _of_all(numbers: Tensor, count: int) -> Tensor:
    """[R, n]"""
    found = [torch.empty_like(numbers) for _ in range(count)]
    dist.all_gather(found, numbers)
    return torch.stack(found)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; gradients are added up and scattered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(found, rows.detach())
        return torch.cat(found, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 2)]
        found = torch.empty_like(parts[0])
        dist.reduce_scatter(found, parts)
        return found


def _gathered(rows: Tensor) -> Tensor:
    found: Tensor = _Gathered.apply(rows)  # type: ignore[no-untyped-call]
    return found


def _summary(columns: Columns) -> dict[str, float | None]:
    """At the longest length: what an all-gather takes over ours, in time and in rows."""
    last = {peer: {name: float(x[-1]) for name, x in columns[peer].items()} for peer in (OURS, GATHER)}  # type: ignore[arg-type]
    times = {peer: row["forward_ms"] + row["backward_ms"] for peer, row in last.items()}
    return {
        "time of an all-gather over ours": times[GATHER] / times[OURS],
        "rows of an all-gather over ours": last[GATHER]["rows_received"] / last[OURS]["rows_received"],
    }
