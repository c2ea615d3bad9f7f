"""Runs four gloo processes: context_ranks.py FOLDER. Every rank writes its results to FOLDER/rankN.pt.

Each case runs in a group with one rank per shard. torch is loaded once, and the processes are forks.
"""

import dataclasses
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from context_cases import CALL, CASES, DISAGREEMENTS, INVALID, Case, answer, planned, shard
from context_models import MODELS, run, shard_of_input
from forked_ranks import exit_codes
from torch import distributed as dist

from alibi_attn.distributed import (
    Traffic,
    context_parallel,
    context_parallel_attention,
    context_parallel_forgetting_attention,
    rank_attention,
)
from alibi_attn.distributed.exchange import Pending, Ranks

RANKS = 4
GARBAGE = Case((120, 90, 60), kv_heads=2)


def of_rank(case: Case, rank: int, group, drawn=None) -> tuple[dict, Traffic]:
    tensors = shard(case, rank, case.drawn() if drawn is None else drawn)
    if case.mask and bool(tensors["key_mask"].all()):
        del tensors["key_mask"]  # ranks without padding may leave it out
    traffic = Traffic()
    options = {"group": group, "timeout": 60.0, "traffic": traffic, **case.options}
    # Only the first rank's generator determines the dropout mask.
    attend = context_parallel_attention, context_parallel_forgetting_attention
    return answer(*attend, tensors, seed=rank, **options), traffic


def with_garbage(rank: int, group) -> bool:
    """Whether the last rank's result has the same bits if rows it does not receive change, at equal norms."""
    drawn = GARBAGE.drawn()
    before, _ = of_rank(GARBAGE, rank, group, drawn)
    sent = planned(GARBAGE, drawn)
    last = len(GARBAGE.lengths) - 1
    for head in range(GARBAGE.kv_heads):
        there = torch.zeros(GARBAGE.total, dtype=torch.bool)
        there[sent.offsets[last] :] = True
        for low, high in sent.spans(last, head):
            there[low:high] = True
        assert not there.all()
        for name in ("key", "value"):
            drawn[name][:, head, ~there] = drawn[name][:, head, ~there].flip(-1).neg()
    after, _ = of_rank(GARBAGE, rank, group, drawn)
    names = ("output", "lse", "dquery")
    return rank != last or all(torch.equal(before[name], after[name]) for name in names)


def order_of_events(rank: int, group) -> list[str]:
    """What a call and its backward do, in order; "own" and "halo" are calls of the rank over the keys of these."""
    case, events = CASES["two ranks"], []
    real = {"attend": rank_attention.attend, "begun": Ranks._begun, "wait": Pending.wait}

    def attend(spec, query, key, value, backend):
        name = "own" if spec.query_offset == 0 else "halo"
        events.append(name)
        key.register_hook(lambda gradient: events.append(f"gradients of {name}"))
        return real["attend"](spec, query, key, value, backend)

    def begun(ranks, begin, what):
        if what.endswith("keys and values"):
            events.append(f"send {what}")
        return real["begun"](ranks, begin, what)

    def wait(pending):
        if pending.what.endswith("keys and values"):
            events.append(f"wait for {pending.what}")
        real["wait"](pending)

    with (
        mock.patch.object(rank_attention, "attend", attend),
        mock.patch.object(Ranks, "_begun", begun),
        mock.patch.object(Pending, "wait", wait),
    ):
        of_rank(dataclasses.replace(case, slopes=(1.0,) * 4), rank, group)
    return [event for event in events if "norms" not in event]


def of_models(rank: int, group) -> dict[str, dict]:
    """Outputs of a shard, and gradients of all parameters, for models over three ranks; also checks undoing it."""
    found = {}
    for name, build in MODELS.items():
        model, whole = build()
        ours = shard_of_input(whole, rank)
        alone = run(model, ours)["output"]
        traffic = Traffic()
        with context_parallel(model, group, timeout=60.0, traffic=traffic) as handle:
            found[name] = run(model, ours)
        found[name]["layers"], found[name]["rows"] = handle.layers, traffic.rows_received
        found[name]["undone"] = torch.equal(run(model, ours)["output"], alone)
    return found


def disagreements(rank: int, group) -> dict[str, str]:
    """The errors that this rank gets when rank 1 of 3 makes a different call."""
    errors = {}
    for name, (of_others, of_one, _) in {**DISAGREEMENTS, **INVALID}.items():
        given = dict.fromkeys(("query", "key", "value"), CALL) | (of_one if rank == 1 else of_others)
        try:
            context_parallel_attention(**given, group=group, timeout=60.0)
            errors[name] = "no error"
        except (ValueError, TypeError) as error:
            errors[name] = str(error)
    return errors


def left_alone(rank: int, group) -> str:
    """The error that a rank gets when another one does not take part."""
    if rank:
        return ""
    q = torch.zeros(1, 4, 10, 8)
    start = time.monotonic()
    try:
        context_parallel_attention(q, q, q, group=group, timeout=0.5)
    except RuntimeError as error:
        return f"{time.monotonic() - start < 20} {error}"
    return "no error"


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 3, 4)}
    lonely = dist.new_group([0, 1])
    found: dict[str, object] = {"cases": {}, "traffic": {}, "again": {}}
    for name, case in CASES.items():
        count = len(case.lengths)
        if rank >= count:
            continue
        found["cases"][name], traffic = of_rank(case, rank, groups[count])
        found["traffic"][name] = vars(traffic)
        if name in ("three, uneven", "outlier keys on rank 0", "gates", "bfloat16"):
            again, _ = of_rank(case, rank, groups[count])
            found["again"][name] = all(torch.equal(x, again[n]) for n, x in found["cases"][name].items())
    if rank < 3:
        found["models"] = of_models(rank, groups[3])
        found["garbage"] = with_garbage(rank, groups[3])
        found["disagreements"] = disagreements(rank, groups[3])
    if rank < 2:
        found["left alone"] = left_alone(rank, lonely)
        found["order"] = order_of_events(rank, groups[2])
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier(group=groups[4])
    os._exit(0)  # a group that timed out may not be taken down in order


if __name__ == "__main__":
    sys.exit(max(map(abs, exit_codes(work, Path(sys.argv[1]), ranks=RANKS))))
