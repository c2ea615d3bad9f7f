"""`alibi bench host`: what a call of the Triton kernels costs the host, without a GPU: Python time, launches, torch operations,
allocations.

On a GPU short calls wait for Python: a kernel runs for microseconds, and the host must prepare and launch it. `absent_device.py`
leaves the kernels out and keeps the rest, so that the Python time, the launches, torch's operations and the allocations of a call
can be counted on any machine. The driver's own time, a few microseconds per launch, is not included.
"""

import functools
import gc
import re
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn import KVCache, alibi_attention, forgetting_attention
from alibi_lab.measure.absent_device import Launch, absent_device
from alibi_lab.measure.decoding import layer_of
from alibi_lab.measure.harness import Config, Rows, Say, forward_pass, keep, training_step
from alibi_lab.measure.inputs import Inputs, published_slopes
from alibi_lab.measure.peers.ours import ours_with_cache

HEADS, TOKENS, HEAD_DIM, CACHED = 8, 256, 16, 2048  # so small that torch's own arithmetic takes no time
BLOCKS = 15  # of calls; the median block counts, in processor time, which other processes do not change
# Views, and allocations, which are counted separately; a GPU launches nothing for them.
FREE = re.compile(
    "empty|view|expand|slice|select|squeeze|strided|detach|alias|transpose|permute|unbind|reshape|narrow|unflatten|flatten|"
    "resolve|lift|split|chunk|result_type|promote_types|item"
)

Step = Callable[[], object]
Row = dict[str, float | int]


def host(out: Path, *, label: str = "present", seconds: float = 1.0, say: Say = print) -> list[Path]:
    """Measures, saves one record, and returns its path.

    Args:
        label: name of the version that is measured; part of the record's name.
        seconds: seconds per kind of call and direction.
    """
    name = f"host/{label}"

    def steps() -> Iterator[Mapping[str, Rows]]:
        with absent_device() as launches:
            for kind, (forward, training) in calls().items():
                row: Row = {"length": CACHED if kind.startswith("decoding") else TOKENS}
                for way, step in (("forward", forward), ("training", training)):
                    if step is not None:
                        row |= {f"{way}_{column}": x for column, x in measured(step, launches, seconds).items()}
                yield {name: {kind: row}}

    config: Config = {"heads": HEADS, "tokens": TOKENS, "head_dim": HEAD_DIM, "cached": CACHED, "dtype": "bfloat16"}
    return keep(out, {name: config}, steps(), say=say)


def calls() -> dict[str, tuple[Step, Step | None]]:
    """For each kind of call: its forward pass without gradients, and forward and backward; None = it has no gradient."""
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator).to(torch.bfloat16) for _ in range(4))
    gates = functional.logsigmoid(torch.randn(1, HEADS, TOKENS, generator=generator) + 4)
    shown = torch.ones(1, TOKENS, dtype=torch.bool)
    shown[:, TOKENS - 10 :] = False
    one, keys, values = (
        torch.randn(1, HEADS, n, HEAD_DIM, generator=generator).to(torch.bfloat16) for n in (1, CACHED, CACHED)
    )
    tiny = [torch.randn(1, 1, 1, 8) for _ in range(4)]
    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor | None]] = {
        "plain": (alibi_attention, inputs, grad),
        "symmetric, masked": (functools.partial(alibi_attention, causal=False, key_mask=shown), inputs, grad),
        "gates": (forgetting_attention, [*inputs, gates], grad),
        "decoding": (
            ours_with_cache("auto")(Inputs(one, keys, values, one, published_slopes(HEADS))),
            [one, keys, values],
            None,
        ),
        "SDPA": (functional.scaled_dot_product_attention, tiny[:3], tiny[3]),
    }
    layer = layer_of(one, one, one)
    caches: dict[str, Any] = {"growing": KVCache(), "forgetting": layer.reach_cache(score_bound=20.0, tolerance=1e-4)}
    for name, cache in caches.items():
        with torch.no_grad():
            cache.append(keys, values)
        # Appends a token to the cache, and attends.
        ways[f"decoding, {name}"] = functools.partial(layer, cache=cache), [one.transpose(1, 2).flatten(2)], None
    return {
        kind: (forward_pass(attention, inputs), None if grad is None else training_step(attention, inputs, grad))
        for kind, (attention, inputs, grad) in ways.items()
    }


def measured(step: Step, launches: list[Launch], seconds: float) -> Row:
    """Milliseconds, launches of our kernels and their arguments, torch's operations, and allocations of one call."""
    for _ in range(3):
        step()
    launches.clear()
    step()
    row: Row = {"launches": len(launches), "arguments": sum(launch.size for launch in launches)}
    row |= counted(step)
    timer = timeit.Timer(step, functools.partial(_begin, launches), time.process_time)
    count = max(1, int(seconds / BLOCKS / max(timer.timeit(1), 1e-6)))
    return row | {"ms": statistics.median(timer.repeat(BLOCKS, count)) / count * 1e3}


def _begin(launches: list[Launch]) -> None:
    """Before each block of calls; timeit turns off garbage collection, which is part of their time."""
    launches.clear()
    gc.enable()


def counted(step: Step) -> Row:
    """The operations of torch that would launch a kernel, and the allocations of memory."""
    with torch.autograd.profiler.profile(use_kineto=False) as profiled:
        step()
    operations = allocations = 0
    for event in profiled.function_events:
        allocations += event.name in ("aten::empty", "aten::empty_strided")
        parent, is_inner = event.cpu_parent, False
        while parent is not None and not is_inner:
            is_inner, parent = _is_operation(parent.name), parent.cpu_parent
        operations += _is_operation(event.name) and not is_inner and not FREE.search(event.name)
    return {"operations": operations, "allocations": allocations}


def _is_operation(name: str) -> bool:
    return name.startswith("aten::") and name != "aten::to"  # if it converts anything, it calls another one
